"""The outputs of one request, between the engine's event loop and that of the caller.

It stands where vLLM keeps a `RequestOutputCollector`, which keeps one output only and merges what comes before that
one is fetched: steps and what was streamed in them would be lost. Here each output waits until it is fetched. There is
no bound, since an engine cannot wait for one of its requests; there are at most ``max_tokens`` outputs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from vllm import RequestOutput

from .compat import RequestOutputCollector, RequestOutputKind
from .in_band import unpacked


class Arrived(NamedTuple):
    """One output.

    Attributes:
        output: vLLM's.
        streamed: `results.to_bytes` of each value that came with it.
        reply: the encoded `Reply`, with the last output.
    """

    output: RequestOutput
    streamed: list[bytes]
    reply: bytes | None


class Inbox(RequestOutputCollector):
    """See the module.

    Args:
        request_id: the engine's id of the request.
        collect: fetches the reply of a block that has yet to learn that its request has ended.

    Attributes:
        begun: done once vLLM has the request, or has refused it.
        over: nothing comes in any more.
    """

    def __init__(self, request_id: str, collect: Callable[[RequestOutput], Awaitable[bytes]]) -> None:
        super().__init__(RequestOutputKind.CUMULATIVE, request_id)
        self._collect = collect
        self._collecting: asyncio.Task[None] | None = None
        self._lock = threading.RLock()  # the collector of garbage may end an inbox in the middle of its own `put`
        self._items: deque[Arrived | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.begun: Future[None] | None = None
        self.over = False

    # --- the engine's side

    def put(self, output: Any) -> None:
        """Take in a `RequestOutput`, or the error that ended the request; called by vLLM on the engine's loop."""
        if self._collecting is not None:
            return  # the last output is on its way
        if isinstance(output, Exception):
            self._hand_over(output)
            return
        for completion in output.outputs:
            completion.token_ids = list(completion.token_ids)  # vLLM's own list goes on growing
        cargo = unpacked(output)
        if output.finished and cargo.reply is None and not self.over:
            self._collecting = asyncio.ensure_future(self._finish(output, cargo.streamed))
        else:
            self._hand_over(Arrived(output, cargo.streamed, cargo.reply))

    async def _finish(self, output: RequestOutput, streamed: list[bytes]) -> None:
        try:
            self._hand_over(Arrived(output, streamed, await self._collect(output)))
        except Exception as error:
            self._hand_over(error)

    def _hand_over(self, item: Arrived | Exception) -> None:
        with self._lock:
            if self.over:
                return
            self.over = isinstance(item, Exception) or item.output.finished
            self._items.append(item)
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            try:
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)
            except RuntimeError:
                return  # the caller's loop is closed, and nobody waits any more

    # --- the caller's side

    def end(self, error: Exception | None = None) -> None:
        """Take in nothing any more; whoever waits, or comes to it, gets the error."""
        if error is not None:
            self._hand_over(error)
        with self._lock:
            self.over = True

    async def take(self) -> Arrived:
        """The next output; on any event loop, one caller at a time.

        Raises:
            the error that ended the request.
        """
        while True:
            with self._lock:
                if self._items:
                    item = self._items.popleft()
                    break
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter
        if isinstance(item, Exception):
            raise item
        return item


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
