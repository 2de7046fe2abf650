"""The synchronous backend: the requests of one trace, run to their ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
from vllm import RequestOutput, SamplingParams

from ..envoy.errors import EngineDiedError, MisuseError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.dependencies import ends_before, meets
from ..tracer.failure import describe
from ..tracer.prompt import Prompt
from .engine import Call, Engine
from .request_output import encode_output
from .settings import KEY


class Request(NamedTuple):
    """A prompt with its sampling parameters."""

    prompt: Prompt
    params: SamplingParams


class SyncBackend:
    """Runs traces on an engine; see `tracer.backend.Backend`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, payload: Payload, request: object) -> tuple[Reply, RequestOutput]:
        """Send the block with its request, wait, and fetch the reply."""
        prompt, params = _prepared(payload, request)
        try:
            output = self._engine.generate(prompt, params)
            reply = self._engine.call("invivo_collect", payload.trace, encode_output(output))
        except EngineDiedError:
            raise
        except BaseException:
            self._engine.call("invivo_discard", payload.trace)
            raise
        if output.outputs[0].finish_reason == "error":
            raise MisuseError(_BROKEN)
        return msgspec.msgpack.decode(reply, type=Reply), output

    def run_group(self, payloads: Sequence[Payload], requests: Sequence[object]) -> list[tuple[Reply, object]]:
        """Run the invokes of a trace together; see `tracer.backend.Backend`.

        One that takes values from others is sent when their blocks have ended. A block is collected, which ends it, as
        soon as its request has ended, and with it those of the blocks that it may still meet at a barrier.
        """
        prepared = [_prepared(payload, request) for payload, request in zip(payloads, requests, strict=True)]
        groups = [payload.group for payload in payloads if payload.group is not None]
        company = meets(groups)
        outputs: dict[int, RequestOutput] = {}
        outcomes: dict[int, tuple[Reply, object]] = {}

        def ended(index: int, output: RequestOutput, call: Call) -> Collection[int]:
            outputs[index] = output
            for at in sorted(outputs.keys() - outcomes.keys()):
                if outputs.keys() >= company[at]:
                    data = call("invivo_collect", payloads[at].trace, encode_output(outputs[at]))
                    outcomes[at] = _read(data, outputs[at]), outputs[at]
            return outcomes

        try:
            self._engine.generate_all(
                [prompt for prompt, _ in prepared],
                [params for _, params in prepared],
                ends_before(groups),
                ended,
            )
        except EngineDiedError:
            raise
        except BaseException:
            self._engine.call("invivo_discard_group", groups[0].trace, [payload.trace for payload in payloads])
            raise
        return [outcomes[index] for index in range(len(payloads))]


_BROKEN = (
    "vLLM ended the request with an error, as it does when a token that the block wrote breaks the structured output "
    "that was asked for; the engine's log says more."
)


def _read(data: bytes, output: RequestOutput) -> Reply:
    """The reply of an invoke, with what vLLM made of its request."""
    reply = msgspec.msgpack.decode(data, type=Reply)
    if output.outputs[0].finish_reason == "error" and reply.failure is None:
        return msgspec.structs.replace(reply, failure=describe(MisuseError(_BROKEN)))
    return reply


def _prepared(payload: Payload, request: object) -> tuple[dict[str, object], SamplingParams]:
    """The prompt and sampling parameters as vLLM takes them, with the block in them.

    The request gets a cache salt of its own and does not look into the prefix cache: what its edits change must not be
    found by others, and rows found in the cache would never pass the block.
    """
    assert isinstance(request, Request), "VLLM.trace makes the request"
    params = request.params.clone()
    params.extra_args = {**(params.extra_args or {}), KEY: msgspec.msgpack.encode(payload)}
    params.skip_reading_prefix_cache = True
    prompt: dict[str, object] = {"prompt_token_ids": request.prompt.token_ids, "cache_salt": payload.trace}
    if request.prompt.text is not None:
        prompt["prompt"] = request.prompt.text
    return prompt, params
