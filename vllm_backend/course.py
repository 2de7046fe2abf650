"""The requests of one trace in an asynchronous engine: when each is sent, and when its block is ended.

A request whose block takes values from others is sent when their blocks have ended. A block that does not end by itself
is ended, by fetching its reply, as soon as its request and those of the blocks that it may meet at a barrier have. All
of this happens on the engine's loop, whether the caller takes outputs or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import msgspec
from vllm import RequestOutput, SamplingParams

from ..tracer.block import Group
from ..tracer.dependencies import ends_before, meets
from ..tracer.prompt import Prompt
from .compat import EngineDeadError
from .in_band import unpacked
from .inbox import Arrived, Collector, Inbox
from .lifecycle import answer
from .request_output import encode_output
from .sampling import refusals

if TYPE_CHECKING:
    from .async_engine import TracingLLM


class Sending(NamedTuple):
    """A request to be sent.

    Attributes:
        prompt: its prompt.
        params: its sampling parameters, with the block in them.
        trace: the id of the block's payload.
        group: the place of the block among those of its trace; None if it needs none of them.
    """

    prompt: Prompt
    params: SamplingParams
    trace: str
    group: Group | None


class Course:
    """See the module; made anywhere, all else on the engine's loop.

    Args:
        llm: the engine.
        requests: those of one trace; all of them have a group, or none.

    Attributes:
        inbox: where their outputs arrive.
        traces: the ids of their payloads.
        single: there is one request, and it is no invoke.
    """

    def __init__(self, llm: TracingLLM, requests: Sequence[Sending]) -> None:
        groups = [request.group for request in requests if request.group is not None]
        self.inbox = Inbox(len(requests))
        self.traces = [request.trace for request in requests]
        self.single = len(requests) == 1 and not groups
        self._llm = llm
        self._group = groups[0].trace if groups else None
        self._after = ends_before(groups) if groups else [set[int]() for _ in requests]
        self._engine: int | None = None
        self._company = meets(groups) if groups else [{index} for index in range(len(requests))]
        self._common = groups[0].common if groups else ()
        self._waiting = dict(enumerate(requests))
        self._sent: list[str] = []
        self._ended: dict[int, Arrived] = {}
        self._fetched: set[int] = set()
        self._over: set[int] = set()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self) -> None:
        """Send the requests that wait for no others. If vLLM refuses one, that is the end of all."""
        try:
            async with self._turn:
                if not self._sent:
                    self._engine = self._llm.least_busy()  # one for all: blocks may have something in common
                if self._common:
                    common, self._common = msgspec.msgpack.encode(self._common), ()
                    await self._llm.collective_rpc("invivo_bring", None, (self._group, common), engine=self._engine)
                for index in [index for index in self._waiting if self._over >= self._after[index]]:
                    if self.inbox.over:
                        return
                    await self._send(index, self._waiting.pop(index))
        except Exception as error:
            await self._fail(error)

    async def leave(self) -> None:
        """Abort all requests, and free what the worker holds of them."""
        async with self._turn:  # what is being sent is sent, and can be aborted
            self._waiting.clear()
            with suppress(EngineDeadError):  # which has freed everything
                await self._llm.abort(self._sent, internal=True)
                if self._group is not None:
                    arguments = (self._group, self.traces)
                    await self._llm.collective_rpc("invivo_discard_group", None, arguments, engine=self._engine)
                    return
                for trace in self.traces:
                    await self._llm.collective_rpc("invivo_discard", None, (trace,), engine=self._engine)

    async def _send(self, index: int, request: Sending) -> None:
        collector = Collector(f"{request.trace}-{uuid4().hex[:8]}", partial(self._take, index))
        self._sent.append(collector.request_id)
        with refusals():
            await self._llm.begin(collector, request.prompt, request.params, self._engine)

    def _take(self, index: int, output: RequestOutput | Exception) -> None:
        if self.inbox.over or index in self._ended:
            return
        if isinstance(output, Exception):
            self.inbox.end(output)
            return
        for completion in output.outputs:
            completion.token_ids = list(completion.token_ids)  # vLLM's own list goes on growing
        cargo = unpacked(output)
        arrived = Arrived(index, output, cargo.streamed, cargo.reply)
        if not output.finished or cargo.reply is not None:
            self.inbox.put(arrived)
            return
        self._ended[index] = arrived
        task = asyncio.ensure_future(self._fetch())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self) -> None:
        """End the blocks that can be ended now, and send what has waited for that."""
        try:
            for index, arrived in sorted(self._ended.items()):
                if index in self._fetched or not self._ended.keys() >= self._company[index]:
                    continue
                if self.inbox.over:
                    return
                self._fetched.add(index)
                call = (self.traces[index], encode_output(arrived.output))
                answers = await self._llm.collective_rpc("invivo_collect", None, call, engine=self._engine)
                reply: bytes = answer(answers)
                self._over.add(index)
                self.inbox.put(arrived._replace(reply=reply))
        except Exception as error:
            await self._fail(error)
        else:
            await self.send()

    async def _fail(self, error: Exception) -> None:
        self.inbox.end(error)
        await self.leave()
