"""Several requests in one batch of an engine: traced and plain ones, started together.

`VLLM.trace` runs one request at a time. A `Batch` takes the blocks of several traces without running them, then hands
all requests to the engine at once and ends every block, as the backend does for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from invivo.tracer.backend import Reply
from invivo.tracer.block import Payload
from invivo.tracer.failure import rebuild
from invivo.tracer.results import pack, unpack
from invivo.vllm_backend.in_band import unpacked
from invivo.vllm_backend.pickup import receive
from invivo.vllm_backend.request_output import encode_output
from invivo.vllm_backend.sync import with_payload


@dataclass
class Member:
    """One finished request of a batch: its output, and the saves and the error of its block if it had one."""

    output: Any
    saves: dict[str, Any]
    error: BaseException | None

    @property
    def tokens(self) -> list[int]:
        return list(self.output.outputs[0].token_ids)


@dataclass
class _Taking:
    """A backend that hands a trace's payload and request to a function instead of running them."""

    run: Callable[[Payload, Any], tuple[Reply, object]]


class Batch:
    """``with batch.traced(prompt, ...) as tracer: ...`` and ``batch.plain(prompt, ...)`` in any order; then `run`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._entries: list[tuple[str | None, Any, Any]] = []

    def traced(self, prompt: Any, **sampling: Any) -> Any:
        """A trace whose block is captured and kept for `run`."""
        trace = self._model.trace(prompt, **sampling)
        trace._backend = _Taking(self._take)
        return trace

    def plain(self, prompt: str, **sampling: Any) -> None:
        """A request without a block."""
        from vllm import SamplingParams

        self._entries.append((None, prompt, SamplingParams(**sampling)))

    def _take(self, payload: Payload, request: Any) -> tuple[Reply, object]:
        prompt = {"prompt_token_ids": request.prompt.token_ids}
        self._entries.append((payload.trace, prompt, with_payload(request, payload)))
        return Reply(pack({}), None, "", (), None), None

    def run(self) -> list[Member]:
        """Run all requests together; the members come in the order in which they were added."""
        from vllm import RequestOutput

        entries, self._entries = self._entries, []
        engine = self._model.engine
        engine.enqueue([prompt for _, prompt, _ in entries], [params for *_, params in entries], use_tqdm=False)
        outputs = engine.wait_for_completion(RequestOutput, use_tqdm=False)
        return [self._member(trace, output) for (trace, *_), output in zip(entries, outputs, strict=True)]

    def _member(self, trace: str | None, output: Any) -> Member:
        if trace is None:
            return Member(output, {}, None)
        call = self._model._engine.call
        reply = receive(unpacked(output).reply or call("invivo_collect", trace, encode_output(output)), trace, call)
        error = None if reply.failure is None else rebuild(reply.failure)
        return Member(output, unpack(reply.saves), error)
