"""What invivo adds to a worker: a runner that tells the blocks what it does, and the calls for the client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ..envoy.errors import UnsupportedError
from ..interleaver.harvest import sink
from .parallel import exchange_trees, has_last_layers, make_hub, sends_home
from .runner_v1 import AdapterV1, RunnerV1
from .serving import Serving
from .settings import asked_for, limits_of

if TYPE_CHECKING:
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
    if not hasattr(kind, "_bookkeeping_sync"):
        raise UnsupportedError(
            f"the engine uses the model runner {kind.__module__}.{kind.__qualname__}; this version of invivo knows "
            "vLLM's V1 runner only. Set VLLM_USE_V2_MODEL_RUNNER=0 for this engine."
        )
    runner.__class__ = type(f"Traced{kind.__name__}", (RunnerV1, kind), {})
    config: Any = wrapper.vllm_config
    limits = limits_of(config.additional_config)
    vocabulary, home = config.model_config.get_vocab_size(), sends_home()
    serving = Serving(AdapterV1(runner), vocabulary, limits, home=home, last=has_last_layers(), make_hub=make_hub)
    runner.serving = serving
    exchange_trees(worker)
    worker.invivo_collect = serving.collect
    worker.invivo_fetch = serving.outbox.fetch
    worker.invivo_drop = serving.outbox.drop
    worker.invivo_discard = serving.discard
    worker.invivo_bring = serving.bring
    worker.invivo_discard_group = serving.discard_group
    worker.invivo_harvest_begin = partial(sink.begin, home=home)
    worker.invivo_harvest_end = sink.end
    worker.invivo_check_integrity = serving.check_integrity
