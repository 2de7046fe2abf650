"""The synchronous backend: the requests of one trace, run to their ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import NamedTuple, cast
from uuid import uuid4

import msgspec
from msgspec import structs
from vllm import RequestOutput, SamplingParams

from ..envoy.errors import EngineDiedError, InvokeError, MisuseError, PreemptedError
from ..tracer.backend import Reply
from ..tracer.block import Group, Payload
from ..tracer.dependencies import ends_before, meets
from ..tracer.failure import describe
from ..tracer.prompt import Prompt
from ..tracer.results import opened
from .engine import Call, Engine
from .in_band import unpacked
from .pickup import Arriving, receive
from .request_output import encode_output
from .samples import joined, rejoined, split, split_group
from .settings import KEY

_AT_ONCE = 16
"""Blocks that one call collects: small saves come along, and the engine stands still for as long."""

ATTEMPTS = 3
"""How often a trace is run that is preempted again and again, before its error is the caller's."""


_NO_MEMORY = (
    "invoke {index} stood at a barrier, and the requests of the blocks that it was to meet found no memory for their "
    "keys and values beside it, or with Model Runner V2 no place among `max_num_seqs`. Give the engine more "
    "(`kv_cache_memory_bytes`, `gpu_memory_utilization`, `max_num_seqs`), or have fewer blocks meet. (A request ends "
    "like this too if a token that its block wrote breaks a structured output.)"
)


class Request(NamedTuple):
    """A prompt with its sampling parameters.

    Attributes:
        reuse_prefix: take what the prefix cache has of the prompt.
    """

    prompt: Prompt
    params: SamplingParams
    reuse_prefix: bool = False


def with_payload(request: Request, payload: Payload) -> SamplingParams:
    """The request's sampling parameters, as new ones, that carry a block.

    The request does not look into the prefix cache, unless it is to: rows found there would never pass the block. What
    its edits change is not found by others either, since the scheduler keeps it out of the cache. What the blocks of a
    trace have in common is sent ahead.
    """
    if payload.group is not None and payload.group.common:
        payload = structs.replace(payload, group=structs.replace(payload.group, common=()))
    params = copy(request.params)
    params.skip_clone = True  # nobody else has it, and vLLM's own copy, a deep one, would take longer than most of this
    params.extra_args = {**(params.extra_args or {}), KEY: msgspec.msgpack.encode(payload)}
    params.skip_reading_prefix_cache = not request.reuse_prefix
    return params


def check_output(output: RequestOutput) -> None:
    """Raise `MisuseError` if vLLM ended the request for its own reasons."""
    if output.outputs[0].finish_reason == "error":
        raise MisuseError(
            "vLLM ended the request with an error, as it does when a token that the block wrote breaks the "
            "structured output that was asked for; the engine's log says more."
        )


def reply_in(output: RequestOutput, trace: str, call: Call) -> Reply:
    """The reply of the block whose request has ended with `output`: what came along, or else what is fetched now."""
    parcel = unpacked(output).reply
    if parcel is None:  # the block has yet to learn that its request has ended
        parcel = call("invivo_collect", trace, encode_output(output))
    return receive(parcel, trace, call)


class SyncBackend:
    """Runs traces on an engine; see `tracer.backend.Backend`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, payload: Payload, request: object) -> tuple[Reply, RequestOutput]:
        """Send the block with its request, wait, and fetch the reply if it did not come along.

        With ``n`` there are as many requests, at once, and what comes home is that of all (`samples.joined`). A run
        that was preempted after an edit is run again from its prompt, with the block from its beginning; nothing of it
        was handed out.
        """
        assert isinstance(request, Request), "VLLM.trace makes the request"
        samples = split(payload, request)
        done = self._attempt(samples)
        for _ in range(ATTEMPTS - 1):
            again = [at for at, (reply, _) in enumerate(done) if was_preempted(reply)]
            if not again:
                break
            fresh = [(again_without_delay(samples[at][0]), samples[at][1]) for at in again]
            for at, outcome in zip(again, self._attempt(fresh), strict=True):
                done[at] = outcome
        return joined(done)

    def _attempt(self, samples: Sequence[tuple[Payload, Request]]) -> list[tuple[Reply, RequestOutput]]:
        prepared = [_prepared(payload, request) for payload, request in samples]
        call = self._engine.call
        left = [payload.trace for payload, _ in samples]
        done = []
        self._engine.start()  # apart: one that cannot start has nothing to forget
        try:
            outputs = self._engine.generate([prompt for prompt, _ in prepared], [params for _, params in prepared])
            for output in outputs:
                done.append((reply_in(output, left[0], call), output))
                del left[0]
        except EngineDiedError:
            raise
        except BaseException:
            for trace in left:
                call("invivo_discard", trace)
            raise
        for output in outputs:
            check_output(output)
        return done

    def run_group(self, payloads: Sequence[Payload], requests: Sequence[object]) -> list[tuple[Reply, object]]:
        """Run the invokes of a trace together; see `tracer.backend.Backend`.

        If one of them was preempted after an edit, all are run again: what it shares with the others has changed. It
        is in the payloads as it was before the first run, and nothing of that was handed out.
        """
        done = self._attempt_group(payloads, requests)
        for _ in range(ATTEMPTS - 1):
            if not any(was_preempted(reply) for reply, _ in done):
                break
            done = self._attempt_group(another_trace(payloads), requests)
        return done

    def _attempt_group(self, payloads: Sequence[Payload], requests: Sequence[object]) -> list[tuple[Reply, object]]:
        """Run the invokes of a trace once.

        One that takes values from others is sent when their blocks have ended. A block is collected, which ends it, as
        soon as its request has ended, and with it those of the blocks that it may still meet at a barrier. One with
        ``n`` is as many requests.
        """
        samples, invokes = split_group(payloads, cast("Sequence[Request]", requests))
        return rejoined(self._run_together([payload for payload, _ in samples], [one for _, one in samples]), invokes)

    def _run_together(
        self, payloads: Sequence[Payload], requests: Sequence[Request]
    ) -> list[tuple[Reply, RequestOutput]]:
        groups = [payload.group for payload in payloads if payload.group is not None]
        company = meets(groups)
        outputs: dict[int, RequestOutput] = {}
        arriving: dict[int, Arriving] = {}

        def ended(finished: Mapping[int, RequestOutput], call: Call) -> Collection[int]:
            outputs.update(finished)
            ready = [at for at in sorted(outputs.keys() - arriving.keys()) if outputs.keys() >= company[at]]
            for some in _calls(ready, groups):
                asked = [(payloads[at].trace, encode_output(outputs[at])) for at in some]
                parcels = msgspec.msgpack.decode(call("invivo_collect_all", asked), type=list[bytes])
                for at, parcel in zip(some, parcels, strict=True):
                    arriving[at] = Arriving(parcel, payloads[at].trace, call)
                    if not groups[at].own:
                        arriving[at].reply()  # before another block goes on, which may change what it saved
            return arriving

        prepared = [_prepared(payload, request) for payload, request in zip(payloads, requests, strict=True)]
        self._engine.start()  # apart: one that cannot start has nothing to forget
        try:
            if groups[0].common:
                self._engine.call("invivo_bring", groups[0].trace, msgspec.msgpack.encode(groups[0].common))
            self._engine.generate_all(
                [prompt for prompt, _ in prepared], [params for _, params in prepared], ends_before(groups), ended
            )
            # Large saves may still be copied: while those of one block are waited for, those of others are read.
            replies = [_opened(arriving[index].reply()) for index in range(len(payloads))]
        except EngineDiedError:
            raise
        except BaseException:
            self._engine.call("invivo_discard_group", groups[0].trace, [payload.trace for payload in payloads])
            raise
        return [(checked(reply, outputs[at], groups[at]), outputs[at]) for at, reply in enumerate(replies)]


def _opened(reply: Reply) -> Reply:
    """The reply, with its saves read."""
    return structs.replace(reply, saves=opened(reply.saves))


def _calls(ready: Sequence[int], groups: Sequence[Group]) -> list[list[int]]:
    """The blocks that are collected by one call each, in order: several where nobody else may change what they save."""
    calls: list[list[int]] = []
    for at in ready:
        if calls and groups[at].own and groups[calls[-1][0]].own and len(calls[-1]) < _AT_ONCE:
            calls[-1].append(at)
        else:
            calls.append([at])
    return calls


def was_preempted(reply: Reply) -> bool:
    """Whether the run can be made again from the prompt, and may then end well."""
    return reply.failure is not None and reply.failure.qualname == PreemptedError.__qualname__


def again_without_delay(payload: Payload) -> Payload:
    """A block that was run in vain, as that of another trace, and with its turns at their time."""
    return structs.replace(payload, trace=uuid4().hex, steady=False)


def another_trace(payloads: Sequence[Payload]) -> list[Payload]:
    """The blocks of a trace, as those of another one."""
    name = uuid4().hex
    return [
        structs.replace(
            payload,
            trace=uuid4().hex,
            steady=False,
            group=structs.replace(payload.group, trace=name) if payload.group is not None else None,
        )
        for payload in payloads
    ]


def _prepared(payload: Payload, request: object) -> tuple[dict[str, object], SamplingParams]:
    """The prompt and sampling parameters as vLLM takes them, with the block in them."""
    assert isinstance(request, Request), "VLLM.trace makes the request"
    prompt: dict[str, object] = {"prompt_token_ids": request.prompt.token_ids}
    if request.prompt.text is not None:
        prompt["prompt"] = request.prompt.text
    return prompt, with_payload(request, payload)


def checked(reply: Reply, output: RequestOutput, group: Group | None) -> Reply:
    """The reply of an invoke, with what vLLM made of its request."""
    try:
        check_output(output)
    except MisuseError as error:
        met = group if group is not None and group.barriers else None
        problem = InvokeError(_NO_MEMORY.format(index=met.index)) if met is not None else error
        return structs.replace(reply, failure=reply.failure or describe(problem))
    return reply
