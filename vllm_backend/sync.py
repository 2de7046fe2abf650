"""The synchronous backend: one request at a time, run to its end."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from vllm import RequestOutput, SamplingParams

from ..envoy.errors import EngineDiedError, MisuseError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.prompt import Prompt
from .engine import Engine
from .in_band import unpacked
from .request_output import encode_output
from .settings import KEY


class Request(NamedTuple):
    """A prompt with its sampling parameters."""

    prompt: Prompt
    params: SamplingParams


def with_payload(params: SamplingParams, payload: Payload) -> SamplingParams:
    """Sampling parameters, as new ones, that carry a block.

    The request does not look into the prefix cache, and gets a cache salt of its own with its prompt: what its edits
    change must not be found by others, and rows found in the cache would never pass the block.
    """
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), KEY: msgspec.msgpack.encode(payload)}
    params.skip_reading_prefix_cache = True
    return params


def check_output(output: RequestOutput) -> None:
    """Raise `MisuseError` if vLLM ended the request for its own reasons."""
    if output.outputs[0].finish_reason == "error":
        raise MisuseError(
            "vLLM ended the request with an error, as it does when a token that the block wrote breaks the "
            "structured output that was asked for; the engine's log says more."
        )


class SyncBackend:
    """Runs traces on an engine; see `tracer.backend.Backend`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, payload: Payload, request: object) -> tuple[Reply, RequestOutput]:
        """Send the block with its request, wait, and fetch the reply if it did not come along."""
        assert isinstance(request, Request), "VLLM.trace makes the request"
        params = with_payload(request.params, payload)
        prompt: dict[str, object] = {"prompt_token_ids": request.prompt.token_ids, "cache_salt": payload.trace}
        if request.prompt.text is not None:
            prompt["prompt"] = request.prompt.text
        try:
            (output,) = self._engine.generate([prompt], [params])
            reply = unpacked(output).reply
            if reply is None:  # the block has yet to learn that its request has ended
                reply = self._engine.call("invivo_collect", payload.trace, encode_output(output))
        except EngineDiedError:
            raise
        except BaseException:
            self._engine.call("invivo_discard", payload.trace)
            raise
        check_output(output)
        return msgspec.msgpack.decode(reply, type=Reply), output
