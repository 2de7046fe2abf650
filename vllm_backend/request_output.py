"""A finished `RequestOutput` on its way to the worker, for blocks that read ``tracer.result``."""

from __future__ import annotations

import msgspec
from vllm.outputs import CompletionOutput, RequestOutput


class WireOutput(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a RequestOutput that a block may read."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


def encode_output(output: RequestOutput) -> bytes:
    """Encode a finished output with one completion."""
    completion = output.outputs[0]
    return msgspec.msgpack.encode(
        WireOutput(
            output.request_id,
            output.prompt if isinstance(output.prompt, str) else None,
            list(output.prompt_token_ids or ()),
            completion.text,
            list(completion.token_ids),
            completion.finish_reason,
            completion.stop_reason,
        )
    )


def decode_output(data: bytes) -> RequestOutput:
    """The output as vLLM's own class (without logprobs and metrics, which stay with the caller)."""
    wire = msgspec.msgpack.decode(data, type=WireOutput)
    completion = CompletionOutput(
        index=0,
        text=wire.text,
        token_ids=wire.token_ids,
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=wire.finish_reason,
        stop_reason=wire.stop_reason,
    )
    return RequestOutput(
        request_id=wire.request_id,
        prompt=wire.prompt,
        prompt_token_ids=wire.prompt_token_ids,
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )
