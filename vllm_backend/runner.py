"""What the mixins of both model runners have in common: one engine step, as vLLM's executor asks for it.

An engine step is two calls. `execute_model` takes in what the scheduler says and runs the forward; `sample_tokens`
samples from its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

from .adapter import NewRequest
from .ahead import stop_tokens
from .compat import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from .eager import EagerSteps
from .parallel import as_bytes, as_tensor
from .settings import DONE, ENDED, HELD, KEY, SAVES, TOLD

if TYPE_CHECKING:
    import torch

    from .compat import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput
    from .layers import Met
    from .serving import Serving

    class _Runner:
        """The parts of vLLM's runners that the mixin relies on."""

        execute_model_state: object

        def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any: ...
        def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput: ...
else:
    _Runner = object


_KEYS_AND_VALUES = (ChunkedLocalAttentionSpec, FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
"""What layers keep that write the keys and values of each token to a place of its own."""


class TracedRunner(_Runner):
    """Mixin in front of the runner's own class: tells `serving` what the runner does."""

    serving: Serving
    _stepping = False
    _completed: ClassVar[str]
    """Where an output that is made complete later has the `ModelRunnerOutput`."""

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
                output = copy(output)
                output.tensors = {**tensors, TOLD: as_tensor(self.serving.tell())}
                return output
            if output is not None and not scheduler_output.total_num_scheduled_tokens:
                output = copy(output)  # one object stands for all outputs of steps in which nothing is computed
                vars(output)[HELD] = self.serving.hub.held
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
        # Looked at first: to take them is to wait for them.
        if intermediate_tensors is not None and TOLD in vars(intermediate_tensors)["tensors"]:
            self.serving.hear(as_bytes(intermediate_tensors.tensors.pop(TOLD)))

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
        serving.sampled(output)
        hub = serving.hub
        if not hub.has_news:
            return output
        told = {
            SAVES: serving.cargo(),
            ENDED: frozenset(hub.ended),
            DONE: hub.take_done(),
            HELD: hub.held,
            TOLD: serving.tell_back(),
        }
        vars(getattr(output, self._completed, output)).update({name: what for name, what in told.items() if what})
        return output


def _each(specs: Sequence[Any]) -> Iterator[Any]:
    for spec in specs:
        yield from spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


class Adapter:
    """The answers of `adapter.RunnerAdapter` that are the same for both runners."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._made: EagerSteps | None = None

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
                stop_tokens(new.sampling_params),
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

    def repeatable(self) -> bool:
        """See `RunnerAdapter`."""
        config = self._runner.vllm_config
        specs = [group.kv_cache_spec for group in self._runner.kv_cache_config.kv_cache_groups]
        alone = config.parallel_config.world_size == 1 and config.kv_transfer_config is None
        return alone and all(type(spec) in _KEYS_AND_VALUES for spec in _each(specs))

    def longest(self) -> int:
        """See `RunnerAdapter`."""
        return int(self._runner.vllm_config.model_config.max_model_len)

    def graphs(self) -> bool:
        """See `RunnerAdapter`."""
        return False

    def warm_up(self, forward: Callable[[], object]) -> None:
        """See `RunnerAdapter`."""
        self._eager.layers.compile(forward)

    def eagerly(self, met: Met) -> AbstractContextManager[None]:
        """See `RunnerAdapter`."""
        return self._eager.step(met)

    @property
    def _eager(self) -> EagerSteps:
        if self._made is None:
            self._made = EagerSteps(self.model(), self._runner.vllm_config)
        return self._made
