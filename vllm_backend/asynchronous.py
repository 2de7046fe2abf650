"""The asynchronous backend: requests start where the `with` ends, and their outputs come as they are made."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NoReturn, cast

from msgspec import structs
from vllm import RequestOutput, SamplingParams

from ..envoy.errors import MisuseError, SamplingError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.results import from_bytes, unpack
from ..tracer.streaming import Delivery
from ..tracer.trace import raise_from_block
from .async_engine import AsyncEngine
from .compat import RequestOutputKind
from .course import Course, Sending
from .inbox import Arrived, Left
from .lifecycle import alive
from .pickup import decoded, receive
from .samples import joined, split, split_group
from .sync import ATTEMPTS, Request, another_trace, checked, was_preempted, with_payload


class AsyncBackend:
    """Starts traces on an engine; see `tracer.streaming.StreamingBackend`. Starts the engine too, which takes time."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def submit(self, payload: Payload, request: object, delivery: Delivery) -> Stream:
        """See `StreamingBackend`; with ``n`` there is a request for each sample."""
        assert isinstance(request, Request), "VLLM.trace makes the request"
        samples = split(payload, request)
        return Stream(_Outputs(self._engine, samples, [0] * len(samples), delivery))

    def submit_group(self, payloads: Sequence[Payload], requests: Sequence[object], delivery: Delivery) -> Stream:
        """See `StreamingBackend`."""
        samples, invokes = split_group(payloads, cast("Sequence[Request]", requests))
        return Stream(_Outputs(self._engine, samples, invokes, delivery))


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
    """The outputs of the requests of one trace, which are aborted when this object goes before their end.

    Args:
        engine: it runs them.
        samples: blocks and requests.
        invokes: of each request, the number of its invoke; several are samples.
        delivery: takes what comes home.

    Attributes:
        saves: all saves, when everything has come.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        samples: Sequence[tuple[Payload, Request]],
        invokes: Sequence[int],
        delivery: Delivery,
    ) -> None:
        self.saves: dict[str, Any] | None = None
        self._engine = engine
        self._payloads = [payload for payload, _ in samples]
        self._requests = [request for _, request in samples]
        self._invokes = invokes
        self._delivery = delivery
        self._done: dict[int, dict[int, tuple[Reply, RequestOutput]]] = {}
        self._left = len(invokes)
        self._error: BaseException | None = None
        self._over = False
        self._begin()

    def _begin(self) -> None:
        sendings = [
            Sending(
                request.prompt,
                with_payload(request, structs.replace(payload, streams=True, steady=False)),
                payload.trace,
                payload.group,
            )
            for payload, request in zip(self._payloads, self._requests, strict=True)
        ]
        self._course: Course = self._engine.begin(sendings)
        self._abandon = weakref.finalize(self, self._engine.abandon, self._course)
        self._abandon.atexit = False

    async def __anext__(self) -> RequestOutput:
        """The next output, with `saves`, and `invoke`, the number of its invoke.

        Raises:
            StopAsyncIteration: there was the last one, or the trace was ended.
            MisuseError: another task waits for the next one.
            EngineDiedError: the engine's process is gone.
            whatever a block raised: in place of the last output of a single request. With invokes or samples, that
                output may be one of a block that has ended well, so the exception comes after it.
        """
        if self._error is not None:
            self._raise()
        if self._over:
            raise StopAsyncIteration
        if self._course.inbox.awaited:
            raise MisuseError(
                "the outputs of a trace come to one task, and another one waits for the next. Take them in one task, "
                "and hand them on with an `asyncio.Queue`."
            )
        try:
            arrived = await self._arrival()
            output: Any = arrived.output  # a RequestOutput, which has no `saves` of its own
            output.saves = {name: value for data in arrived.streamed for name, value in from_bytes(data).items()}
            if arrived.reply is not None:
                self._end(arrived.request, output, await self._opened(arrived))
        except Left:
            raise StopAsyncIteration from None
        except BaseException:
            self._leave()
            raise
        return arrived.output

    async def last(self) -> dict[str, Any]:
        """Wait for the end, of which the caller sees no output before; gives all saves. Raises as `__anext__` does.

        A trace of which a run was preempted after an edit is run again from its prompts, with its blocks from their
        beginning: nobody has seen anything of it.
        """
        attempt, ended = 1, await self._ended()
        while attempt < ATTEMPTS and not self._over and any(was_preempted(reply) for _, reply in ended):
            attempt += 1
            self._abandon.detach()
            self._payloads = another_trace(self._payloads)
            self._begin()
            ended = await self._ended()
        for arrived, reply in ended:
            output: Any = arrived.output
            output.saves = {}
            self._end(arrived.request, output, reply)
        if self._error is not None:
            self._raise()
        assert self.saves is not None, "all has come"
        return self.saves

    async def _ended(self) -> list[tuple[Arrived, Reply]]:
        """The last outputs of all requests, in the order in which they come."""
        ended: list[tuple[Arrived, Reply]] = []
        try:
            while len(ended) < len(self._invokes):
                arrived = await self._arrival()
                if arrived.reply is not None:
                    ended.append((arrived, await self._opened(arrived)))
        except Left:
            raise MisuseError(
                "the trace was ended (`tracer.backend.aclose()`) while its end was awaited: nothing of it comes home."
            ) from None
        except BaseException:
            self._leave()
            raise
        return ended

    async def _arrival(self) -> Arrived:
        with alive():
            arrived = await self._course.inbox.take()
        output: Any = arrived.output  # which has no `invoke` of its own
        output.invoke = self._invokes[arrived.request]
        output.outputs[0].index = self._invokes[: arrived.request].count(output.invoke)
        return arrived

    def _end(self, request: int, output: Any, reply: Reply) -> None:
        """The last output of a request, with its reply: the saves go onto it, and home once all samples are there."""
        invoke, self._left = output.invoke, self._left - 1
        samples = self._done.setdefault(invoke, {})
        samples[request] = reply, output
        several = self._invokes.count(invoke) > 1
        saves = unpack(reply.saves) if several else {}
        if len(samples) == self._invokes.count(invoke):
            whole: Any
            joint, whole = joined([samples[at] for at in sorted(self._done.pop(invoke))])
            home = self._delivery.arrived(invoke, joint, whole)
            if several:
                whole.saves = home
            else:
                saves = home
        output.saves.update(saves)
        if self._left == 0:
            self._over = True
            self._abandon.detach()
            self.saves, around, self._error = self._delivery.ended()
            output.saves.update(around)
            if self._error is not None and self._course.single:
                self._raise()

    def _raise(self) -> NoReturn:
        assert self._error is not None and self.saves is not None, "all has come"
        error, self._error = self._error, None
        raise_from_block(error, self.saves)

    async def _opened(self, arrived: Arrived) -> Reply:
        """The reply in a parcel; waiting for large saves does not hold the caller's event loop up."""
        assert arrived.reply is not None, "it is there with the last output"
        payload = self._payloads[arrived.request]
        call = partial(receive, arrived.reply, payload.trace, self._engine.call)
        reply = call() if decoded(arrived.reply).ticket is None else await asyncio.to_thread(call)
        return checked(reply, arrived.output, payload.group)

    def _leave(self) -> Any:
        self._over = True
        return self._abandon()

    async def aclose(self) -> None:
        """Abort the requests that have not ended, and wait until they are gone."""
        gone = self._leave()
        if gone is not None:
            await asyncio.wrap_future(gone)


class Stream:
    """``tracer.backend`` of a trace whose requests were started: their outputs, to be taken once.

    The requests are aborted when nobody can take the outputs any more: the loop over them was left, or this object is
    gone.
    """

    def __init__(self, outputs: _Outputs) -> None:
        self._outputs: _Outputs | None = outputs
        self._taken = weakref.ref(outputs)
        self._saves: dict[str, Any] | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """The outputs, each with ``.saves``: what was newly streamed, and in the last one of a request all its saves.

        Raises:
            MisuseError: somebody takes, or took, them already.
        """
        return self._take()

    async def collect(self) -> dict[str, Any]:
        """Wait for the end of all requests, and return all saves. Raises what a block raised."""
        if self._saves is None:
            self._saves = await self._take().last()
        return self._saves

    async def aclose(self) -> None:
        """Abort the requests that have not ended, and wait until everything of them is freed."""
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
