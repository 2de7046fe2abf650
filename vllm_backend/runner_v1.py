"""Model Runner V1 (`vllm/v1/worker/gpu_model_runner.py`; the CPU's and the GPU's): where it is met.

`execute_model` updates the batch, decides how the step is run once its rows are known
(`_determine_batch_execution_and_padding`), and calls `_model_forward`; `sample_tokens`, a second call, samples from the
logits. Warm-up and profiling runs do not come through `execute_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..interleaver.windows import Share, shares
from .compiled_kind import ROWS
from .runner import Adapter, TracedRunner

if TYPE_CHECKING:
    from .compat import SamplerOutput, SchedulerOutput

    class _Runner:
        """The parts of `GPUModelRunner` that the mixin relies on, beside those of `TracedRunner`."""

        intermediate_tensors: Any
        max_num_tokens: int
        vllm_config: Any
        device: Any

        def get_model(self) -> Any: ...
        def _determine_batch_execution_and_padding(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any: ...
        def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any: ...
        def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput: ...
        def _dummy_run(self, num_tokens: int) -> Any: ...
        def warming_up_model(self) -> None: ...
else:
    _Runner = object


class RunnerV1(TracedRunner, _Runner):
    """`TracedRunner` on Runner V1."""

    _completed = "_model_runner_output"

    def warming_up_model(self) -> None:
        """Compile the model, and its layers; only the CPU's runner is asked for this."""
        super().warming_up_model()
        if self.max_num_tokens >= ROWS:
            self.serving.warm_up(partial(self._dummy_run, ROWS))

    def _hear(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> None:
        # vLLM makes it when it warms up, which an eager CPU engine does not.
        if intermediate_tensors is not None and self.intermediate_tensors is None:
            config = self.vllm_config
            self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=config.scheduler_config.max_num_batched_tokens,
                dtype=config.model_config.dtype,
                device=self.device,
            )
        super()._hear(scheduler_output, intermediate_tensors)

    def _determine_batch_execution_and_padding(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if self._stepping:
            self.serving.begin(num_tokens)
            if self.serving.needs_modules:
                kwargs["force_eager"] = True  # no graph either
        return super()._determine_batch_execution_and_padding(num_tokens, *args, **kwargs)

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self._stepping:
            return super()._model_forward(input_ids, *args, **kwargs)
        forward = partial(super()._model_forward, input_ids, *args, **kwargs)
        rows = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        # Layers may work in the memory of the embeddings that they are given.
        return self.serving.forward(rows.shape[0], forward, again=input_ids is not None)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        if not self.serving.active or logits is None:
            return super()._sample(logits, spec_decode_metadata)
        output = super()._sample(self.serving.logits(logits), spec_decode_metadata)
        output.sampled_token_ids = self.serving.samples(output.sampled_token_ids)
        self.serving.finish_step()
        return output


class AdapterV1(Adapter):
    """Runner V1's answers; implements `adapter.RunnerAdapter`."""

    _asked: tuple[list[str], list[int]] | None = None
    """The requests of the last step that was asked about, and the position that each has come to."""

    def clean(self, request_id: str) -> None:
        """See `RunnerAdapter`."""
        runner = self._runner
        if runner.device.type != "cpu" and not hasattr(runner, "_kv_block_zeroer"):
            runner._init_kv_zero_meta()
        if request_id in runner.requests:
            groups = runner.requests[request_id].block_ids
            runner._zero_block_ids(sorted({block for group in groups for block in group}))

    def shares(self, rows: int) -> Mapping[str, Share]:
        """See `RunnerAdapter`; the order is that of the batch, not that of the scheduler's output."""
        batch = self._runner.input_batch
        count = batch.num_reqs
        names, starts = batch.req_ids[:count], self._runner.query_start_loc.np[: count + 1]
        computed = batch.num_computed_tokens_cpu[:count]
        self._asked = names, (computed + starts[1:] - starts[:-1]).tolist()
        return shares(names, starts.tolist(), computed.tolist(), batch.num_prompt_tokens[:count].tolist(), rows)

    def follows(self) -> bool:
        """See `RunnerAdapter`."""
        batch = self._runner.input_batch
        count = batch.num_reqs
        names, computed = batch.req_ids[:count], batch.num_computed_tokens_cpu[:count]
        before, self._asked = self._asked, (names, (computed + 1).tolist())
        return before == (names, computed.tolist()) and int(self._runner.query_start_loc.np[count]) == count

    def tokens(self, output: Any) -> Mapping[str, int]:
        """See `RunnerAdapter`."""
        output.async_copy_ready_event.synchronize()
        sampled = output.sampled_token_ids_cpu[:, 0].tolist()
        without = {*output._invalid_req_indices}
        names = output._model_runner_output.req_ids
        return {name: token for at, (name, token) in enumerate(zip(names, sampled)) if at not in without}  # noqa: B905

    def compiled(self) -> bool:
        """See `RunnerAdapter`."""
        return bool(self._runner.vllm_config.compilation_config.mode)  # NONE is 0
