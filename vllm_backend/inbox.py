"""The outputs of the requests of one trace, between the engine's event loop and that of the caller.

vLLM hands the outputs of a request to its `RequestOutputCollector`, which keeps one only and merges what comes before
that one is fetched: steps and what was streamed in them would be lost. Here each output waits until it is fetched.
There is no bound, since an engine cannot wait for one of its requests; there are at most ``max_tokens`` outputs of
each.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from vllm import RequestOutput

from .compat import RequestOutputCollector, RequestOutputKind


class Arrived(NamedTuple):
    """One output.

    Attributes:
        request: the number of its request.
        output: vLLM's.
        streamed: `results.to_bytes` of each value that came with it.
        reply: the parcel of the `Reply`, with the last output of the request.
    """

    request: int
    output: RequestOutput
    streamed: list[bytes]
    reply: bytes | None


class Left(Exception):
    """The trace was ended from this side, so nothing comes any more; whoever still waits gets this."""


class Collector(RequestOutputCollector):
    """Stands where vLLM keeps its collector of one request, and hands on what vLLM puts there, on the engine's loop.

    Args:
        request_id: the engine's id of the request.
        take: called with each `RequestOutput`, or the error that ended the request.
    """

    def __init__(self, request_id: str, take: Callable[[RequestOutput | Exception], None]) -> None:
        super().__init__(RequestOutputKind.CUMULATIVE, request_id)
        self._take = take

    def put(self, output: Any) -> None:
        self._take(output)


class Inbox:
    """See the module.

    Args:
        count: how many requests there are.

    Attributes:
        over: nothing comes in any more.
    """

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.RLock()  # the collector of garbage may end an inbox in the middle of its own `put`
        self._items: deque[Arrived | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.over = False

    # --- the engine's side

    def put(self, item: Arrived | Exception) -> None:
        """Take in an output, or the error that ended the trace."""
        with self._lock:
            if self.over:
                return
            self._items.append(item)
            if isinstance(item, Exception):
                self.over = True
            elif item.output.finished:
                self._left -= 1
                self.over = self._left == 0
        self._notify()

    def end(self, error: Exception | None = None) -> None:
        """Take in nothing any more; whoever waits, or comes to it, gets the error, or `Left`."""
        if error is not None:
            self.put(error)
        with self._lock:
            self.over = True
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with suppress(RuntimeError):  # the caller's loop is closed, and nobody waits any more
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    # --- the caller's side

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for the next output."""
        waiter = self._waiter
        return waiter is not None and not waiter.done() and not waiter.get_loop().is_closed()

    async def take(self) -> Arrived:
        """The next output; on any event loop, one caller at a time (see `awaited`).

        Raises:
            Left: the trace was ended from this side.
            the error that ended the trace.
        """
        while True:
            with self._lock:
                if self._items:
                    item = self._items.popleft()
                    break
                if self.over:
                    raise Left
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter
        if isinstance(item, Exception):
            raise item
        return item


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
