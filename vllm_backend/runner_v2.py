"""Model Runner V2 (`vllm/v1/worker/gpu/model_runner.py`; the default on GPUs): where it is met.

`execute_model` updates its states, gathers those of the batch (`gather_batch_req_state`), asks the manager of the CUDA
graphs how to run the step (`dispatch`), prepares the inputs, and replays a graph of the whole model, or calls it.
`sample_tokens`, a second call, computes the logits and samples from them. Runs for warm-up and profiling come by
`execute_model`, too, as dummy runs.

How a step is run is decided inside of `execute_model`, so for a step in which a block waits for a module two parts of
the runner are replaced for the time of the call: the model by one that runs module by module, and the manager by one
that knows no graphs but those in pieces (`graphs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..interleaver.windows import Share, shares
from .compat import CUDAGraphMode, set_forward_context
from .graphs import Graphs
from .runner import Adapter, TracedRunner

if TYPE_CHECKING:
    from .compat import SchedulerOutput
    from .serving import Serving

    class _Runner:
        """The parts of `GPUModelRunner` that the mixin relies on, beside those of `TracedRunner`."""

        model: Any
        cudagraph_manager: Any
        sampler: Any
        vllm_config: Any
        lora_config: Any
        is_encoder_decoder: bool
        uses_inputs_embeds: bool
        use_pp: bool
        ubatch_runner: Any
        dp_size: int
        model_config: Any
        model_state: Any
        req_states: Any
        attn_groups: Any
        kv_cache_config: Any

        def gather_batch_req_state(self, scheduler_output: SchedulerOutput, dummy_run: bool) -> tuple[Any, Any]: ...
        def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any: ...
        def prepare_attn(self, input_batch: Any) -> Any: ...
        def get_model(self) -> torch.nn.Module: ...
        def sample(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    _Runner = object


class RunnerV2(TracedRunner, _Runner):
    """`TracedRunner` on Runner V2.

    Attributes:
        batch: states of the requests of the engine step (`BatchReqState`), once they are gathered.
        pieces: the graphs of steps with modules, once there are any.
    """

    batch: Any = None
    pieces: Graphs | None = None
    _inputs: Any = None
    _tables: Any = None
    _completed = "model_runner_output"
    _begun = False

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """One engine step, up to the logits; or a dummy run, which is none of the blocks' business."""
        if dummy_run:
            run = super(TracedRunner, self).execute_model
            return run(scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs)
        self._begun = False
        model, manager = self.model, self.cudagraph_manager
        try:
            output = super().execute_model(scheduler_output, intermediate_tensors, *args, **kwargs)
        finally:
            self.model, self.cudagraph_manager = model, manager
        if self._begun:
            self.serving.forward_done()
        return output

    def gather_batch_req_state(self, scheduler_output: SchedulerOutput, dummy_run: bool) -> tuple[Any, Any]:
        """As in vLLM; once the batch is known, the blocks have their turns at the beginning of the step."""
        gathered = super().gather_batch_req_state(scheduler_output, dummy_run)
        if self._stepping:
            self.batch = gathered[0]
            self._begun = True
            decodes = not self.batch.has_prefill
            self.serving.begin(self.batch.num_tokens, self.pieces if decodes else None)
            if self.serving.needs_modules:
                graphs = None
                if decodes and self.serving.hub.learned is not None and self.can_capture:
                    graphs = self._in_pieces
                self.model = _Eager(self.model, self.serving)
                self.cudagraph_manager = _Manager(self.cudagraph_manager, graphs)
        return gathered

    @property
    def can_capture(self) -> bool:
        """Whether steps with modules may be captured: not under what does more around a forward than calling it, nor
        where a forward could not be run again."""
        more = (self.lora_config, self.is_encoder_decoder, self.uses_inputs_embeds, self.use_pp, self.ubatch_runner)
        prefetch = self.vllm_config.offload_config.prefetch.offload_group_size
        plain = not any(more) and not prefetch and self.dp_size == 1 and not self.model_config.enable_sleep_mode
        return plain and self.serving.repeatable

    def _in_pieces(self, rows: int) -> object:
        if self.pieces is None:
            self.pieces = Graphs(self.model_state.model)
        if self.serving.hub.lagging:
            output = self.pieces.run_late(rows, self.serving.hub)
            if output is not None:
                return output
            self.serving.resume()
        with set_forward_context(None, self.vllm_config, rows):  # for modules that a block calls
            return self.pieces.run(rows, self.serving.hub, self._prepared, self.serving.take_expected())

    def _prepared(self, capture: bool) -> Callable[[], object]:
        """Make ready to call the model on the inputs of this step, as `execute_model` does.

        What is captured must not depend on the lengths of this step. vLLM says so when it makes its attention's
        metadata (`for_capture`), for which some kinds of attention write into the inputs.
        """
        batch, model = self._inputs, self.model
        blocks, slots = self._tables
        with self._kept(capture):
            made = self.model_state.prepare_attn(
                batch, CUDAGraphMode.FULL, blocks, slots, self.attn_groups, self.kv_cache_config, for_capture=capture
            )
        groups = zip(slots, self.kv_cache_config.kv_cache_groups, strict=False)
        slot_of = {name: slot for slot, group in groups for name in group.layer_names}
        inputs = {"input_ids": batch.input_ids, "positions": batch.positions, "inputs_embeds": None}
        inputs |= {"intermediate_tensors": None, **self.model_state.prepare_inputs(batch, self.req_states)}

        def call() -> object:
            rows, padding = batch.num_tokens_after_padding, batch.is_padding
            with set_forward_context(made, self.vllm_config, rows, slot_mapping=slot_of, is_padding=padding):
                return model(**inputs)

        return call

    @contextmanager
    def _kept(self, really: bool) -> Iterator[None]:
        """The inputs of the step are afterwards what they were before."""
        batch, (blocks, slots) = self._inputs, self._tables
        tensors = [batch.seq_lens, batch.query_start_loc, batch.positions, batch.input_ids, slots, *blocks]
        before = [tensor.clone() for tensor in tensors] if really else []
        yield
        for tensor, value in zip(tensors, before, strict=False):
            tensor.copy_(value)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """As in vLLM."""
        inputs = super().prepare_inputs(*args, **kwargs)
        if self._begun:
            self._inputs = inputs
            self.serving.pad(inputs.num_tokens_after_padding)
        return inputs

    def prepare_attn(self, input_batch: Any) -> Any:
        """As in vLLM."""
        self._tables = super().prepare_attn(input_batch)
        return self._tables

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As in vLLM, with the blocks' turns before and after the sampler."""
        if not self._begun or not self.serving.active:
            return super().sample(*args, **kwargs)
        sampler = self.sampler
        self.sampler = _Sampler(sampler, self.serving)
        try:
            return super().sample(*args, **kwargs)
        finally:
            self.sampler, self._begun = sampler, False


class _StandIn:
    """Something in the place of a part of the runner, for one call; what it does not do itself, the part does."""

    def __init__(self, part: Any, serving: Serving | None = None) -> None:
        self._part = part
        self._serving = serving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _Eager(_StandIn):
    """The model, run module by module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._serving is not None
        with self._serving.eagerly():
            return self._part(*args, **kwargs)


class _Manager(_StandIn):
    """The manager of the CUDA graphs, for a step with modules: as if it had none, or with `graphs` for its own."""

    def __init__(self, part: Any, graphs: Callable[[int], object] | None) -> None:
        super().__init__(part)
        self._graphs = graphs

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """How to run such a batch."""
        found = self._part.dispatch(num_reqs, num_tokens, *args, **kwargs)
        if self._graphs is not None and found.cg_mode == CUDAGraphMode.FULL:
            return found
        none = {"cg_mode": CUDAGraphMode.NONE, "uniform_token_count": None, "max_query_len": None}
        return dataclasses.replace(found, num_tokens=num_tokens, num_reqs=num_reqs, **none)

    def run_fullgraph(self, desc: Any) -> Any:
        """The forward of a batch that `dispatch` wants a graph of the whole model for."""
        assert self._graphs is not None
        return self._graphs(desc.num_tokens)


class _Sampler(_StandIn):
    """The sampler: blocks see its logits before it does, and its tokens before anybody else."""

    def __call__(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self._serving is not None
        output = self._part(self._serving.logits(logits), *args, **kwargs)
        output.sampled_token_ids = self._serving.samples(output.sampled_token_ids)
        self._serving.finish_step()
        return output


class AdapterV2(Adapter):
    """Runner V2's answers; implements `adapter.RunnerAdapter`.

    A request that goes on after a preemption comes as a new one, under the id that it had.
    """

    _asked: tuple[list[str], list[int]] | None = None
    """The requests of the last step that was asked about, and the position that each has come to."""

    def clean(self, request_id: str) -> None:
        """See `RunnerAdapter`; the tables of the blocks are on the device, and their lengths on the host."""
        runner = self._runner
        row = runner.req_states.req_id_to_index.get(request_id)
        if row is None:
            return
        if vars(runner)["kv_block_zeroer"] is None:
            runner._init_kv_zero_meta()
        tables = runner.block_tables
        groups = zip(tables.block_tables, tables.num_blocks.np[:, row].tolist(), strict=True)
        blocks = {block for table, count in groups for block in table.gpu[row, :count].tolist()}
        runner.kv_block_zeroer.zero_block_ids(sorted(blocks))

    def shares(self, rows: int) -> Mapping[str, Share]:
        """See `RunnerAdapter`; the order is that of the batch, which V2 sorts."""
        batch, states = self._runner.batch, self._runner.req_states
        at = batch.idx_mapping_np
        starts = [0, *np.cumsum(batch.num_scheduled_tokens).tolist()]
        positions = states.num_computed_tokens_np[at]
        self._asked = batch.req_ids, (positions + batch.num_scheduled_tokens).tolist()
        return shares(batch.req_ids, starts, positions.tolist(), states.prompt_len.np[at].tolist(), rows)

    def graphs(self) -> bool:
        """See `RunnerAdapter`."""
        return True

    def follows(self) -> bool:
        """See `RunnerAdapter`."""
        batch, before = self._runner.batch, self._asked
        positions = self._runner.req_states.num_computed_tokens_np[batch.idx_mapping_np]
        self._asked = batch.req_ids, (positions + 1).tolist()
        one_each = not batch.has_prefill and batch.num_tokens == len(batch.req_ids)
        return one_each and before == (batch.req_ids, positions.tolist())

    def tokens(self, output: Any) -> Mapping[str, int]:
        """See `RunnerAdapter`."""
        output.copy_event.synchronize()
        found = zip(
            output.model_runner_output.req_ids,
            output.sampled_token_ids[:, 0].tolist(),
            output.num_sampled_tokens_np.tolist(),
            strict=True,
        )
        return {name: token for name, token, count in found if count}

    def compiled(self) -> bool:
        """See `RunnerAdapter`; a graph of the whole model calls no module, whether that was compiled or not."""
        config = self._runner.vllm_config.compilation_config
        return bool(config.mode) or config.cudagraph_mode != CUDAGraphMode.NONE
