"""The synchronous backend: one request at a time, run to its end."""

from __future__ import annotations

from typing import NamedTuple
from uuid import uuid4

import msgspec
from msgspec import structs
from vllm import RequestOutput, SamplingParams

from ..envoy.errors import EngineDiedError, MisuseError, PreemptedError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.prompt import Prompt
from .engine import Engine
from .in_band import unpacked
from .pickup import receive
from .request_output import encode_output
from .settings import KEY

_ATTEMPTS = 3
"""How often a request is run that is preempted again and again, before its error is the caller's."""


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
    its edits change is not found by others either, since the scheduler keeps it out of the cache.
    """
    params = request.params.clone()
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


class SyncBackend:
    """Runs traces on an engine; see `tracer.backend.Backend`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, payload: Payload, request: object) -> tuple[Reply, RequestOutput]:
        """Send the block with its request, wait, and fetch the reply if it did not come along.

        A run that was preempted after an edit is run again from its prompt, with the block from its beginning; nothing
        of it was handed out.
        """
        assert isinstance(request, Request), "VLLM.trace makes the request"
        for _ in range(_ATTEMPTS - 1):
            reply, output = self._attempt(payload, request)
            if reply.failure is None or reply.failure.qualname != PreemptedError.__qualname__:
                return reply, output
            payload = structs.replace(payload, trace=uuid4().hex)
        return self._attempt(payload, request)

    def _attempt(self, payload: Payload, request: Request) -> tuple[Reply, RequestOutput]:
        prompt: dict[str, object] = {"prompt_token_ids": request.prompt.token_ids}
        if request.prompt.text is not None:
            prompt["prompt"] = request.prompt.text
        call = self._engine.call
        try:
            (output,) = self._engine.generate([prompt], [with_payload(request, payload)])
            parcel = unpacked(output).reply
            if parcel is None:  # the block has yet to learn that its request has ended
                parcel = call("invivo_collect", payload.trace, encode_output(output))
            reply = receive(parcel, payload.trace, call)
        except EngineDiedError:
            raise
        except BaseException:
            call("invivo_discard", payload.trace)
            raise
        check_output(output)
        return reply, output
