"""What invivo adds to a worker: a runner that tells the blocks what it does, and the calls for the client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ..envoy.errors import UnsupportedError
from ..interleaver.harvest import sink
from .arguments import check_split
from .parallel import exchange_trees, has_last_layers, make_hub, sends_home
from .runner_v1 import AdapterV1, RunnerV1
from .runner_v2 import AdapterV2, RunnerV2
from .serving import Serving
from .settings import asked_for, limits_of

if TYPE_CHECKING:
    from .adapter import RunnerAdapter
    from .compat import WorkerWrapperBase


def attach(wrapper: WorkerWrapperBase) -> None:
    """Make a worker serve traces, if its engine was set up for them.

    Raises:
        UnsupportedError: the engine uses a runner that invivo does not know.
    """
    if not asked_for(wrapper.vllm_config.additional_config):
        return
    worker: Any = wrapper.worker
    runner = worker.model_runner
    kind = type(runner)
    mixin: type[RunnerV1 | RunnerV2]
    adapter: RunnerAdapter
    if hasattr(kind, "_bookkeeping_sync"):
        mixin, adapter = RunnerV1, AdapterV1(runner)
    elif hasattr(kind, "gather_batch_req_state"):
        mixin, adapter = RunnerV2, AdapterV2(runner)
    else:
        raise UnsupportedError(
            f"the engine uses the model runner {kind.__module__}.{kind.__qualname__}; this version of invivo knows "
            "vLLM's Model Runners V1 and V2 only."
        )
    runner.__class__ = type(f"Traced{kind.__name__}", (mixin, kind), {})
    config: Any = wrapper.vllm_config
    home = sends_home()
    limits = limits_of(config.additional_config)
    ahead = bool(config.scheduler_config.async_scheduling)
    check_split(config, v2=mixin is RunnerV2)
    serving = Serving(
        adapter,
        config.model_config.get_vocab_size(),
        limits,
        ahead=ahead,
        home=home,
        last=has_last_layers(),
        make_hub=make_hub,
    )
    runner.serving = serving
    exchange_trees(worker)
    worker.invivo_collect = serving.collect
    worker.invivo_collect_all = serving.collect_all
    worker.invivo_fetch = serving.outbox.fetch
    worker.invivo_drop = serving.outbox.drop
    worker.invivo_discard = serving.discard
    worker.invivo_bring = serving.bring
    worker.invivo_discard_group = serving.discard_group
    worker.invivo_harvest_begin = partial(sink.begin, home=home)
    worker.invivo_harvest_end = sink.end
    worker.invivo_check_integrity = serving.check_integrity
