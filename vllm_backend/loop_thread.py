"""An event loop of its own, on a thread of its own.

vLLM's `AsyncLLM` belongs to the loop that it first ran on. Its users' loops come and go (`asyncio.run` makes a new one
each time), so it runs here instead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class LoopThread:
    """The loop runs from the beginning until `stop`; its thread does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, function: Callable[..., Coroutine[Any, Any, R]], *args: object) -> Future[R]:
        """Run ``function(*args)`` on the loop; from any thread, without waiting.

        Raises:
            RuntimeError: the loop has stopped.
        """
        future: Future[R] = Future()

        def begin() -> None:
            asyncio.ensure_future(function(*args)).add_done_callback(lambda task: _hand_on(task, future))

        self._loop.call_soon_threadsafe(begin)
        return future

    def soon(self, action: Callable[[], object]) -> None:
        """Call something on the loop's thread. Raises `RuntimeError` if the loop has stopped."""
        self._loop.call_soon_threadsafe(action)

    def stop(self) -> None:
        """Cancel what still runs there, and end the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            while tasks := asyncio.all_tasks(self._loop):  # again, for what was submitted in the last moment
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


def _hand_on(task: asyncio.Future[R], future: Future[R]) -> None:
    """Give the end of a task to whoever waits for it on another thread."""
    if not future.set_running_or_notify_cancel():
        return
    if task.cancelled():
        future.set_exception(RuntimeError("the engine's event loop was stopped."))
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
