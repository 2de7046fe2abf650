"""The asynchronous backend: the request starts where the `with` ends, and its outputs come as they are made."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from msgspec import structs
from vllm import RequestOutput, SamplingParams

from ..envoy.errors import MisuseError, SamplingError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.results import from_bytes
from ..tracer.streaming import Deliver
from .async_engine import AsyncEngine
from .compat import RequestOutputKind
from .lifecycle import alive
from .pickup import decoded, receive
from .sync import ATTEMPTS, Request, check_output, was_preempted, with_payload


class AsyncBackend:
    """Starts traces on an engine; see `tracer.streaming.StreamingBackend`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def submit(self, payload: Payload, request: object, deliver: Deliver) -> Stream:
        """See `StreamingBackend`; starts the engine if need be, which takes its time."""
        assert isinstance(request, Request), "VLLM.trace makes the request"
        return Stream(_Outputs(self._engine, structs.replace(payload, streams=True), request, deliver))


def check_streams(params: SamplingParams) -> None:
    """Refuse sampling parameters under which steps would have no output of their own.

    Raises:
        SamplingError: there is such a one.
    """
    if params.output_kind != RequestOutputKind.CUMULATIVE:
        raise SamplingError(
            f"`output_kind={params.output_kind.name}`: in a trace every output has all the text so far, and every step "
            "has one. Leave it out; `await tracer.backend.collect()` waits for the end."
        )
    if params.stream_interval not in (None, 1):
        raise SamplingError(
            f"`stream_interval={params.stream_interval}`: what a trace streams goes with the output of its step, and "
            "every step needs one. Leave it out."
        )


class _Outputs(AsyncIterator[RequestOutput]):
    """The outputs of one request. It is aborted when this object goes before its end.

    A run that was preempted after an edit is made again from the prompt, as long as the caller has seen nothing of it.
    """

    def __init__(self, engine: AsyncEngine, payload: Payload, request: Request, deliver: Deliver) -> None:
        self.saves: dict[str, Any] | None = None
        self._engine = engine
        self._payload = payload
        self._request = request
        self._deliver = deliver
        self._attempts = 0
        self._seen = False
        self._over = False
        self._begin()

    def _begin(self) -> None:
        self._attempts += 1
        trace = self._payload.trace
        self._inbox = self._engine.begin(self._request.prompt, trace, with_payload(self._request, self._payload))
        self._abandon = weakref.finalize(self, self._engine.abandon, self._inbox, trace)
        self._abandon.atexit = False

    async def __anext__(self) -> RequestOutput:
        """The next output, with `saves`.

        Raises:
            StopAsyncIteration: there was the last one.
            EngineDiedError: the engine's process is gone.
            whatever the block raised, after the last output.
        """
        if self._over:
            raise StopAsyncIteration
        output = await self._next()
        self._seen = True
        return output

    async def last(self) -> dict[str, Any]:
        """Wait for the end, of which the caller sees no output before; gives all saves. Raises as `__anext__` does."""
        while not self._over:
            await self._next()
        assert self.saves is not None, "an end without saves raises"
        return self.saves

    async def _next(self) -> RequestOutput:
        output: Any  # a RequestOutput, which has no `saves` of its own
        try:
            with alive():
                output, streamed, reply = await self._inbox.take()
        except BaseException:
            self._over = True
            self._abandon()
            raise
        output.saves = {name: value for data in streamed for name, value in from_bytes(data).items()}
        if reply is not None:
            self._over = True
            self._abandon.detach()
            opened = await self._opened(reply)
            if was_preempted(opened) and not self._seen and self._attempts < ATTEMPTS:
                self._payload = structs.replace(self._payload, trace=uuid4().hex)
                self._begin()
                self._over = False
                return await self._next()
            self.saves = self._deliver(opened, output)
            check_output(output)
            output.saves.update(self.saves)
        return output

    async def _opened(self, parcel: bytes) -> Reply:
        """The reply in a parcel; waiting for large saves does not hold the caller's event loop up."""
        if decoded(parcel).ticket is None:
            return receive(parcel, self._payload.trace, self._engine.call)
        return await asyncio.to_thread(receive, parcel, self._payload.trace, self._engine.call)

    async def aclose(self) -> None:
        """Abort the request, if it has not ended, and wait until it is gone."""
        self._over = True
        self._attempts = ATTEMPTS  # or whoever waits for an output might begin another run
        gone = self._abandon()
        if gone is not None:
            await asyncio.wrap_future(gone)


class Stream:
    """``tracer.backend`` of a trace whose request was started: its outputs, to be taken once.

    The request is aborted when nobody can take the outputs any more: the loop over them was left, or this object is
    gone.
    """

    def __init__(self, outputs: _Outputs) -> None:
        self._outputs: _Outputs | None = outputs
        self._taken = weakref.ref(outputs)
        self._saves: dict[str, Any] | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """The outputs, each with ``.saves``: what was newly streamed, and in the last one all saves.

        Raises:
            MisuseError: somebody takes, or took, them already.
        """
        return self._take()

    async def collect(self) -> dict[str, Any]:
        """Wait for the end of the request, and return all saves. Raises what the block raised."""
        if self._saves is None:
            self._saves = await self._take().last()
        return self._saves

    async def aclose(self) -> None:
        """Abort the request, if it has not ended, and wait until everything of it is freed."""
        outputs, self._outputs = self._taken(), None
        if outputs is not None:
            await outputs.aclose()

    def _take(self) -> _Outputs:
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            raise MisuseError(
                "the outputs of this trace were taken before: they come once, and leaving the loop over them ends the "
                "request. `tracer.saves` and `tracer.result` are there after the last one."
            )
        return outputs
