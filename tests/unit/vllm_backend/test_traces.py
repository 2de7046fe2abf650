"""A trace is forgotten when its reply has gone and its request has left; one that nobody fetches, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import InternalError, PreemptedError
from invivo.interleaver.hub import Hub
from invivo.interleaver.launch import Launched
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.streamed import Streamed
from invivo.interleaver.windows import Share
from invivo.tracer.backend import Reply
from invivo.tracer.block import Block
from invivo.tracer.results import from_bytes, unpack
from invivo.vllm_backend import traces
from invivo.vllm_backend.outbox import Outbox
from invivo.vllm_backend.pickup import decoded
from invivo.vllm_backend.traces import Known, Traces

BLOCK = Block("with model.trace() as tracer:\n    pass\n", "<block>", 1, 0, "<module>", "module", "tracer", ())


class Worker:
    """A hub with the traces of a worker, on a module of one layer."""

    def __init__(self) -> None:
        self.module = torch.nn.Sequential(torch.nn.Linear(2, 2))
        self.hub = Hub(self.module)
        self.envoy: Any = RootEnvoy(self.hub.tree, "")
        self.traces = Traces(Outbox())
        self.now = 0.0

    def add(self, name: str, body: Callable[[Any, Mediator], dict[str, object]], group: str | None = None) -> Mediator:
        mediator = Mediator(self.hub.tree, Turns(0, None), lambda mediator: body(self.envoy, mediator))
        mediator.streamed = Streamed()
        self.traces.add(f"trace {name}", Known(name, Launched(mediator, BLOCK, None), group))
        self.hub.add(name, mediator, None)
        return mediator

    def step(self, *requests: str, number: int = 0) -> dict[str, tuple[list[dict[str, object]], Reply | None]]:
        with torch.inference_mode():
            self.hub.begin({request: Share(None, None, number) for request in requests})
            self.module(torch.ones(1, 2))
            self.hub.finish_step()
        return {
            request: (
                [from_bytes(data) for data in streamed],
                None if reply is None else decoded(reply).reply,
            )
            for request, (streamed, reply) in self.traces.cargo(self.hub).items()
        }

    def leave(self, *requests: str) -> None:
        self.traces.leave(set(requests), self.hub, self.now)


def ends(envoy: Any, mediator: Mediator) -> dict[str, object]:
    return {"h": mediator.save(envoy[0].output, stream=True, names=("h",))}


def edits(envoy: Any, mediator: Mediator) -> dict[str, object]:
    envoy[0].output[:] = 0
    return {}


def goes_on(envoy: Any, mediator: Mediator) -> dict[str, object]:
    step = 0
    while mediator.advance(step):
        mediator.save(step, stream=True, names=("step",))
        step += 1
    return {}


def test_the_reply_of_a_block_that_has_ended_goes_once() -> None:
    worker = Worker()
    worker.add("a", ends)
    streamed, reply = worker.step("a")["a"]
    assert reply is not None and unpack(reply.saves).keys() == {"h"}
    assert [values.keys() for values in streamed] == [{"h"}]
    assert worker.step("a", number=1) == {}
    with pytest.raises(InternalError, match="its reply was sent before"):
        worker.traces.fetched("trace a")
    worker.leave("a")
    assert not worker.traces
    worker.hub.check_integrity()


def test_a_block_that_ended_well_and_whose_request_is_computed_again() -> None:
    worker = Worker()
    worker.add("a", edits)
    _, before = worker.step("a")["a"]
    _, after = worker.step("a")["a"]
    assert before is not None and after is not None
    assert before.failure is None
    assert after.failure is not None and after.failure.qualname == PreemptedError.__qualname__
    assert after.saves == before.saves
    assert "a" in worker.hub.ended
    worker.leave("a")
    worker.hub.check_integrity()


@pytest.mark.parametrize("home", [True, False])
def test_the_reply_of_one_of_several_blocks_waits_to_be_fetched(home: bool) -> None:
    worker = Worker()
    worker.traces._outbox = Outbox(home=home)
    worker.add("a", ends, "a group")
    assert worker.step("a")["a"][1] is None
    assert worker.step("a", number=1) == {}
    worker.leave("a")
    known = worker.traces.fetched("trace a")
    parcel = worker.traces.parcel("trace a", known, worker.hub)
    assert parcel == known.parcel and bool(parcel) is home
    if home:
        assert unpack(decoded(parcel).reply.saves).keys() == {"h"}
    worker.hub.remove("a")
    assert not worker.traces


def test_a_block_that_goes_on_is_fetched() -> None:
    worker = Worker()
    worker.add("a", goes_on)
    assert worker.step("a") == {"a": ([{"step": 0}], None)}
    assert worker.step("a", number=1) == {"a": ([{"step": 1}], None)}
    worker.leave("a")
    assert worker.traces.fetched("trace a").request_id == "a"
    worker.hub.end("a", None)
    worker.hub.remove("a")
    assert not worker.traces
    worker.hub.check_integrity()


def test_only_the_last_value_of_a_streaming_loop_is_held() -> None:
    worker = Worker()
    mediator = worker.add("a", goes_on)
    for number in range(5):
        worker.step("a", number=number)
    assert [entry.value for entry in mediator.saved] == [4]
    worker.hub.remove("a")


def test_traces_that_nobody_fetches_are_forgotten_in_time() -> None:
    worker = Worker()
    for name in ("a", "b"):
        worker.add(name, goes_on)
    worker.step("a", "b")
    worker.leave("a")
    worker.now = traces.KEPT_SECONDS
    worker.leave()
    assert len(worker.traces) == 2
    worker.now += 1
    worker.leave()
    assert len(worker.traces) == 1
    assert worker.hub.mediators.keys() == {"b"}
    assert worker.traces.given_up("trace a") is None
    assert worker.traces.given_up("trace b") is not None
    worker.hub.remove("b")
    worker.hub.check_integrity()


def test_blocks_of_a_trace_are_kept_while_others_of_it_run() -> None:
    worker = Worker()
    for name in ("a", "b"):
        worker.add(name, goes_on, "group")
    worker.step("a", "b")
    worker.leave("a")
    for _ in range(3):
        worker.now += traces.KEPT_SECONDS
        worker.leave()
    worker.leave("b")
    assert len(worker.traces) == 2
    worker.now += traces.KEPT_SECONDS + 1
    worker.leave()
    assert not worker.traces
    worker.hub.check_integrity()


def test_too_many_traces_that_nobody_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "KEPT", 3)
    worker = Worker()
    names = [str(number) for number in range(6)]
    for name in names:
        worker.add(name, goes_on)
    worker.step(*names)
    for name in names[:5]:
        worker.leave(name)
    assert worker.hub.mediators.keys() == {"2", "3", "4", "5"}
    for name in list(worker.hub.mediators):
        worker.hub.remove(name)
