"""Model Runner V1 (`vllm/v1/worker/gpu_model_runner.py`; the CPU's and the GPU's): where it is met.

`execute_model` updates the batch, decides how the step is run once its rows are known
(`_determine_batch_execution_and_padding`), and calls `_model_forward`; `sample_tokens`, a second call, samples from the
logits. Warm-up and profiling runs do not come through `execute_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ..interleaver.windows import Share, shares
from .adapter import NewRequest
from .eager import EagerSteps
from .parallel import as_bytes, as_tensor
from .settings import DONE, ENDED, HELD, KEY, SAVES, TOLD

if TYPE_CHECKING:
    from .compat import AsyncModelRunnerOutput, ModelRunnerOutput, SamplerOutput, SchedulerOutput
    from .serving import Serving

    class _Runner:
        """The parts of `GPUModelRunner` that the mixin relies on."""

        execute_model_state: object
        intermediate_tensors: Any
        vllm_config: Any
        device: Any

        def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any: ...
        def get_model(self) -> Any: ...
        def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput: ...
        def _determine_batch_execution_and_padding(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any: ...
        def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any: ...
        def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput: ...
else:
    _Runner = object


class RunnerV1(_Runner):
    """Mixin in front of the runner's own class: tells `serving` what the runner does."""

    serving: Serving
    _stepping = False

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """One engine step, up to the logits or what the next stage of a pipeline is given."""
        self.serving.clean(scheduler_output)
        self.serving.leave(scheduler_output)
        self.serving.admit(scheduler_output)
        self._hear(scheduler_output, *args, **kwargs)
        if not self.serving.active:
            return super().execute_model(scheduler_output, *args, **kwargs)
        self._stepping = True
        try:
            output = super().execute_model(scheduler_output, *args, **kwargs)
            if isinstance(tensors := getattr(output, "tensors", None), dict):
                return type(output)({**tensors, TOLD: as_tensor(self.serving.tell())})
            return output
        except BaseException:
            self.serving.abandon_step()
            raise
        finally:
            self._stepping = False

    def _hear(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> None:
        """Take in what other stages of a pipeline tell."""
        told = getattr(scheduler_output, TOLD, None)
        if told and self.serving.active:
            self.serving.hear_back(told)
        if intermediate_tensors is not None:
            if self.intermediate_tensors is None:  # vLLM makes it when it warms up, which an eager CPU engine does not
                config = self.vllm_config
                self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                    batch_size=config.scheduler_config.max_num_batched_tokens,
                    dtype=config.model_config.dtype,
                    device=self.device,
                )
            if TOLD in vars(intermediate_tensors)["tensors"]:  # looked at first: to take them is to wait for them
                self.serving.hear(as_bytes(intermediate_tensors.tensors.pop(TOLD)))

    def _determine_batch_execution_and_padding(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if self._stepping:
            self.serving.begin(num_tokens)
            if self.serving.needs_modules:
                kwargs["force_eager"] = True  # no graph either
        return super()._determine_batch_execution_and_padding(num_tokens, *args, **kwargs)

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self._stepping:
            return super()._model_forward(input_ids, *args, **kwargs)
        rows = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        with self.serving.forward(rows.shape[0]):
            return super()._model_forward(input_ids, *args, **kwargs)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        if not self.serving.active or logits is None:
            return super()._sample(logits, spec_decode_metadata)
        output = super()._sample(self.serving.logits(logits), spec_decode_metadata)
        output.sampled_token_ids = self.serving.samples(output.sampled_token_ids)
        self.serving.finish_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the tokens; the output says what the blocks have done, and brings what they send home.

        With asynchronous scheduling the tokens are on their way to the host when this returns, and another thread makes
        the output complete. What is told is of now, and what others do not touch.
        """
        sampled = self.execute_model_state is not None
        output = super().sample_tokens(grammar_output)
        if not sampled or not self.serving.active:
            return output
        serving = self.serving
        told = {
            SAVES: serving.cargo(),
            ENDED: serving.ended,
            DONE: serving.take_done(),
            HELD: serving.held,
            TOLD: serving.tell_back(),
        }
        vars(getattr(output, "_model_runner_output", output)).update(
            {name: what for name, what in told.items() if what}
        )
        return output


class AdapterV1:
    """Runner V1's answers; implements `adapter.RunnerAdapter`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._eager: EagerSteps | None = None

    def model(self) -> torch.nn.Module:
        """See `RunnerAdapter`."""
        model: torch.nn.Module = self._runner.get_model()
        return model

    def new_requests(self, scheduled: SchedulerOutput) -> Sequence[NewRequest]:
        """See `RunnerAdapter`."""
        return [
            NewRequest(
                new.req_id,
                extra[KEY],
                new.sampling_params.num_logprobs is not None,
                not new.sampling_params.skip_reading_prefix_cache,
            )
            for new in scheduled.scheduled_new_reqs
            if new.sampling_params is not None and KEY in (extra := new.sampling_params.extra_args or {})
        ]

    def finished(self, scheduled: SchedulerOutput) -> AbstractSet[str]:
        """See `RunnerAdapter`."""
        return scheduled.finished_req_ids

    def leaving(self, scheduled: SchedulerOutput) -> AbstractSet[str]:
        """See `RunnerAdapter`."""
        return scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())

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
        return shares(
            batch.req_ids[:count],
            self._runner.query_start_loc.np[: count + 1],
            batch.num_computed_tokens_cpu[:count],
            batch.num_prompt_tokens[:count],
            rows,
        )

    def compiled(self) -> bool:
        """See `RunnerAdapter`."""
        return bool(self._runner.vllm_config.compilation_config.mode)  # NONE is 0

    def eagerly(self) -> AbstractContextManager[None]:
        """See `RunnerAdapter`."""
        if self._eager is None:
            self._eager = EagerSteps(self.model(), self._runner.vllm_config)
        return self._eager.step()
