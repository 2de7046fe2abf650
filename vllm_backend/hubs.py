"""The hub of a worker that has the whole model, and how a block becomes one of any hub's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..interleaver.bounds import Bounds, tables
from ..interleaver.hub import Hub
from ..interleaver.lagging_hub import LaggingHub
from ..interleaver.mediator import Mediator
from ..interleaver.staged_hub import Staged
from ..interleaver.staged_mediator import StagedMediator
from ..interleaver.steady_mediator import SteadyMediator
from .module_call import call_module

if TYPE_CHECKING:
    from ..tracer.block import Payload
    from .adapter import NewRequest, RunnerAdapter

_FIXED_SAMPLES = (
    "`model.samples` cannot be written in a trace with `logprobs`: vLLM reports those of the token that it sampled "
    "itself. Leave `logprobs` out and read `model.logits`, or write `model.logits` so that the token is sampled."
)


def is_whole(hub: Hub) -> bool:
    """Whether no other worker has a part of the model."""
    return type(hub) in (Hub, LaggingHub)


def whole_hub(adapter: RunnerAdapter) -> Hub:
    """The hub of a worker that has the whole model."""
    model, compiled = adapter.model(), adapter.compiled()
    if adapter.repeatable():
        return LaggingHub(model, call_module, compiled=compiled, graphs=adapter.graphs())
    return Hub(model, call_module, compiled=compiled)


def kind_of(hub: Hub, payload: Payload, new: NewRequest, *, ahead: bool) -> type[Mediator]:
    """The kind of mediator that a block gets.

    Args:
        hub: where it will be.
        payload: what it came as.
        new: its request.
        ahead: a step may run before it is known whether a token of the last one has ended the request.
    """
    if isinstance(hub, Staged):
        return StagedMediator
    lags = isinstance(hub, LaggingHub) and not (payload.uses or payload.streams or (ahead and new.stops))
    return SteadyMediator if lags and payload.steady else Mediator


def fit_in(mediator: Mediator, hub: Hub, new: NewRequest, adapter: RunnerAdapter) -> None:
    """Say what of the engine and its request concerns a block that has had no turn yet.

    Args:
        mediator: the block.
        hub: where it will be.
        new: its request.
        adapter: of the runner.
    """
    if not is_whole(hub):
        mediator.alone = False  # its twins in other workers have their turns when it has
    hub.streams = mediator.streamed is not None or (hub.streams and len(hub.mediators) > 0)
    mediator.fixed_samples = _FIXED_SAMPLES if new.logprobs else None
    mediator.partial_prompt = new.reuses_prefix
    if hub.calls.bounds is None:
        rows = hub.places.tables if isinstance(hub, Staged) else tables(adapter.model())
        hub.calls.bounds = Bounds(rows, adapter.longest())
    mediator.bounds = hub.calls.bounds
