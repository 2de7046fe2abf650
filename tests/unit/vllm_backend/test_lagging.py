"""Blocks that have their turns some steps later: what they get is what they would have got at the time.

The model is made up, and so are its graphs (`support.fake_graph`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from invivo.envoy.address import LOGITS, OUTPUT, SAMPLES, Port, port_at
from invivo.envoy.errors import PreemptedError
from invivo.interleaver.hub import Hub
from invivo.interleaver.lagging_hub import LaggingHub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.steady_mediator import SteadyMediator
from invivo.interleaver.windows import Share, shares
from invivo.vllm_backend.graphs import Graphs
from support.fake_graph import FakeGraph
from support.fused_toy import WIDTH, Model

Visit = Callable[[Mediator, int], Any]

OVER = "what a block sees last"


class Engine:
    """Decodes requests, as Runner V2 and `Serving` do with graphs, or module by module, as Runner V1 does."""

    def __init__(self, *, late: bool, graphs: bool) -> None:
        torch.manual_seed(0)
        self.model = Model().train(False)
        self.late = late
        self.hub = LaggingHub(self.model, compiled=True, graphs=graphs) if late else Hub(self.model, compiled=True)
        self.graphs = Graphs(self.model, FakeGraph) if late and graphs else None
        self.input = torch.zeros(0, WIDTH)
        self.done: dict[str, int] = {}
        self.before: tuple[list[str], list[int]] = [], []

    def add(self, request: str, mediator: Mediator) -> None:
        mediator.index = ord(request)
        self.hub.add(request, mediator, WIDTH)
        self.done[request] = 0

    def step(self, names: Sequence[str], number: int) -> list[list[float]]:
        """One engine step; the value of a row depends on its request and step alone."""
        with torch.inference_mode():
            at = [self.done[name] for name in names]
            padded = len(names) + 1
            if self.input.shape[0] != padded:
                self.input = torch.zeros(padded, WIDTH)
                if self.graphs is not None:
                    self.graphs = Graphs(self.model, FakeGraph)
            for row, (name, step) in enumerate(zip(names, at, strict=True)):
                self.input[row] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(ord(name) * 1000 + step))
            split = shares(list(names), range(len(names) + 1), at, [1] * len(names), len(names))
            output = self._forward([*names], at, split, padded)
            self.hub.forward_done()
            logits = output[: len(names)].clone()
            replaced: Any = self.hub.fire(port_at("", LOGITS), logits)
            samples = (logits if replaced is None else replaced).argmax(-1)
            if self.hub.waited_for(port_at("", SAMPLES)):
                self.hub.fire(port_at("", SAMPLES), samples)
            self.hub.finish_step()
            for name in names:
                self.done[name] += 1
            return logits.tolist()  # type: ignore[no-any-return]

    def _forward(self, names: list[str], at: list[int], split: dict[str, Share], padded: int) -> torch.Tensor:
        hub, graphs, call = self.hub, self.graphs, lambda: self.model(self.input)
        follows, self.before = self.before == (names, at), (names, [step + 1 for step in at])
        found: Any
        lags = isinstance(hub, LaggingHub) and hub.armed and hub.lags(follows=follows)
        if graphs is None or not isinstance(hub, LaggingHub):
            if not lags:
                hub.begin(split)
            hub.pad(padded)
            found = hub.run(call) if hub.needs_modules else call()
            return found  # type: ignore[no-any-return]
        if lags:
            hub.pad(padded)
            if not hub.needs_modules:
                return call()  # type: ignore[no-any-return]
            found = graphs.run_late(padded, hub)
            if found is not None:
                return found  # type: ignore[no-any-return]
            hub.catch_up()
        entering = graphs.expected(hub, split, ())
        hub.begin(split, entering)
        hub.pad(padded)
        if (entering or hub.needs_modules) and hub.learned is not None:
            found = graphs.run(padded, hub, lambda _: call, entering)
            return found  # type: ignore[no-any-return]
        return call()  # type: ignore[no-any-return]


def body(visit: Visit, seen: list[Any]) -> Callable[[Mediator], dict[str, object]]:
    def run(mediator: Mediator) -> dict[str, object]:
        step = 0
        while not step or mediator.advance(step):
            seen.append(visit(mediator, step))
            if seen[-1] is OVER:
                break
            step += 1
        return {}

    return run


def out(address: str) -> Port:
    return port_at(address, OUTPUT)


def reads(*ports: Port) -> Visit:
    def visit(mediator: Mediator, step: int) -> Any:
        return [mediator.read(port, port.kind) for port in ports]

    return visit


def reads_items(*asked: tuple[Port, Sequence[int]]) -> Visit:
    """Reads items of what passes at ports, in order; none of them stands for all."""

    def visit(mediator: Mediator, step: int) -> Any:
        return [
            [mediator.read_item(port, item) for item in items] or mediator.read(port, "output") for port, items in asked
        ]

    return visit


PORTS = [
    out("layers.0"),
    out("layers.1.mlp"),
    out("layers.1"),
    out("layers.2.mlp"),
    port_at("", LOGITS),
    port_at("", SAMPLES),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def compare(
    visits: dict[str, Visit], batches: Sequence[Sequence[str]], graphs: bool
) -> tuple[LaggingHub, dict[str, Any]]:
    """Run blocks at their time and late; assert that those that did not stray have seen the same."""
    results: list[tuple[dict[str, list[Any]], dict[str, Any], Hub]] = []
    for late in (False, True):
        engine, kind = Engine(late=late, graphs=graphs), SteadyMediator if late else Mediator
        seen: dict[str, list[Any]] = {name: [] for name in visits}
        failures: dict[str, Any] = {}
        for name, visit in visits.items():
            engine.add(name, kind(engine.hub.tree, Turns(0, None, ()), body(visit, seen[name])))
        for number, names in enumerate(batches):
            engine.step(names, number)
        for name in visits:
            with torch.inference_mode():
                engine.hub.end(name, None)
            failures[name] = engine.hub.mediators[name].failure
            engine.hub.remove(name)
        engine.hub.check_integrity()
        results.append((seen, failures, engine.hub))
    (expected, errors, _), (found, others, hub) = results
    for name in visits:
        if isinstance(others[name], PreemptedError):
            continue
        assert (type(errors[name]), str(errors[name])) == (type(others[name]), str(others[name]))
        assert same(expected[name], found[name]), name
    assert isinstance(hub, LaggingHub)
    return hub, others


@pytest.fixture(params=[True, False], ids=["graphs", "as the ports fire"])
def graphs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("ports", [PORTS[:1], PORTS[1:3], PORTS[4:5], PORTS[5:], PORTS])
def test_what_is_read_later_is_what_was_there(ports: list[Port], graphs: bool) -> None:
    hub, failures = compare({name: reads(*ports) for name in "abc"}, ["abc"] * 60, graphs)
    assert (hub.kept > 40) == (graphs or not all(port.of_step for port in ports))
    assert hub.strayed == 0 and set(failures.values()) == {None}


def test_blocks_that_read_different_ports(graphs: bool) -> None:
    hub, _ = compare({"a": reads(PORTS[0]), "b": reads(*PORTS[2:5]), "c": reads(PORTS[5])}, ["abc"] * 40, graphs)
    assert hub.kept > 20


FIRST, MLP, SECOND, LAST = PORTS[:4]


@pytest.mark.parametrize(
    "asked",
    [
        [(FIRST, [0])],
        [(FIRST, [1]), (SECOND, [0])],
        [(FIRST, [0, 1]), (MLP, [0]), (SECOND, [1, 0])],
        [(FIRST, []), (MLP, []), (SECOND, [1])],
    ],
)
def test_items_of_tuples_that_are_read_later(asked: list[tuple[Port, list[int]]], graphs: bool) -> None:
    others = reads_items((SECOND, [0]))
    hub, failures = compare({"a": reads_items(*asked), "b": others, "c": reads(PORTS[0])}, ["abc"] * 40, graphs)
    assert hub.kept > 20 and hub.strayed == 0 and set(failures.values()) == {None}


class Packed(Model):
    """One of its modules gives a list in a tuple."""

    class Pack(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            return hidden + 1, [residual + 1]

    def __init__(self) -> None:
        super().__init__()
        self.pack = self.Pack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, (residual,) = self.pack(self.embed(x), super().forward(x))
        found: torch.Tensor = hidden + residual
        return found


@pytest.mark.parametrize("items", [[], [0], [1], [0, 1]])
def test_containers_in_a_tuple_stay(items: list[int], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Model", Packed)
    compare({"a": reads_items((out("pack"), items)), "b": reads(PORTS[4])}, ["ab"] * 40, graphs)


@pytest.mark.parametrize("graphs", [False], ids=["as the ports fire"])
def test_other_items_are_not_kept(graphs: bool) -> None:
    engine = Engine(late=True, graphs=graphs)
    assert isinstance(engine.hub, LaggingHub)
    engine.add("a", SteadyMediator(engine.hub.tree, Turns(0, None, ()), body(reads_items((SECOND, [1])), [])))
    for number in range(20):
        engine.step("a", number)
    assert engine.hub._running is not None
    (kept,) = engine.hub._running.moments
    assert [len(tensors) for tensors, _ in kept._pieces] == [1]
    engine.hub.abandon_step()


def strays(step: int, what: Callable[[Mediator], object]) -> Visit:
    def visit(mediator: Mediator, number: int) -> Any:
        hidden: Any = mediator.read(PORTS[1], "output")
        if number == step:
            what(mediator)
        return [hidden, mediator.read(PORTS[4], "logits")]

    return visit


def edits(mediator: Mediator) -> None:
    mediator.held.value[:] *= 2  # type: ignore[union-attr, index]


def assigns(mediator: Mediator) -> None:
    mediator.write(PORTS[1], "output", mediator.held.value * 2)  # type: ignore[union-attr, operator]


def stops(mediator: Mediator) -> None:
    mediator.stop()


def asks(mediator: Mediator) -> None:
    mediator.read(PORTS[0], "output")


def asks_another(mediator: Mediator) -> None:
    mediator.read(PORTS[2], "output")


def asks_item(mediator: Mediator) -> None:
    mediator.read_item(PORTS[0], 0)


def calls(mediator: Mediator) -> None:
    mediator.call("layers.0.mlp", (torch.zeros(1, WIDTH),), {})


def waits(mediator: Mediator) -> None:
    mediator.result()


@pytest.mark.parametrize("step", [20, 29, 30, 31])
@pytest.mark.parametrize("what", [edits, assigns, stops, asks, asks_item, asks_another, calls, waits])
def test_one_that_does_something_else_is_run_again(what: Callable[[Mediator], object], step: int, graphs: bool) -> None:
    hub, failures = compare({"a": strays(step, what), "b": reads(PORTS[0])}, ["ab"] * 40, graphs)
    assert hub.kept > 10 and hub.strayed == 1
    assert isinstance(failures["a"], PreemptedError) and failures["b"] is None


@pytest.mark.parametrize("more", ["another item", "all", "an edit", "what was read before"])
def test_one_that_looks_at_more_of_a_tuple_is_run_again(more: str, graphs: bool) -> None:
    before: list[Any] = []

    def visit(mediator: Mediator, step: int) -> Any:
        found: Any = mediator.read_item(SECOND, 0)
        if step == 25:
            if more == "another item":
                mediator.read_item(SECOND, 1)
            elif more == "all":
                mediator.read(SECOND, "output")
            else:
                (found if more == "an edit" else before[-1]).mul_(2)
        before.append(found)
        return found

    hub, failures = compare({"a": visit, "b": reads_items((FIRST, [1]))}, ["ab"] * 40, graphs)
    assert hub.kept > 10 and hub.strayed == 1
    assert isinstance(failures["a"], PreemptedError) and failures["b"] is None


@pytest.mark.parametrize("then", ["over", "waits for the end"])
@pytest.mark.parametrize("edit", [False, True], ids=["read", "edited"])
def test_one_that_needs_no_more_steps_is_not_behind_when_the_batch_changes(then: str, edit: bool, graphs: bool) -> None:
    def visit(mediator: Mediator, step: int) -> Any:
        found: Any = mediator.read(PORTS[1], "output")
        if edit:
            found.mul_(2)
        if then == "over":
            return OVER
        return [found, mediator.result()]

    visits = {"a": visit, "b": reads(PORTS[0]), "c": reads(PORTS[2])}
    hub, failures = compare(visits, [*["abc"] * 40, *["ab"] * 40, *["abc"] * 3], graphs)
    assert hub.kept > 30 and set(failures.values()) == {None}


def test_an_exception_is_the_blocks_own(graphs: bool) -> None:
    def fails(mediator: Mediator) -> None:
        raise ValueError("as it should")

    hub, failures = compare({"a": strays(25, fails), "b": reads(PORTS[0])}, ["ab"] * 40, graphs)
    assert hub.strayed == 0 and isinstance(failures["a"], ValueError) and failures["b"] is None


def test_what_was_read_earlier_may_be_changed_and_costs_another_run(graphs: bool) -> None:
    def visit(mediator: Mediator, step: int) -> Any:
        first: Any = mediator.read(PORTS[0], "output")
        second: Any = mediator.read(PORTS[2], "output")
        first[0].mul_(3)
        return [first, second, mediator.read(PORTS[4], "logits")]

    hub, failures = compare({"a": visit, "b": reads(PORTS[0], PORTS[2])}, ["ab"] * 40, graphs)
    assert hub.strayed == 1 and isinstance(failures["a"], PreemptedError) and failures["b"] is None


def test_no_block_has_memory_of_another(graphs: bool) -> None:
    where: dict[str, set[int]] = {"a": set(), "b": set()}

    def noting(name: str) -> Visit:
        def visit(mediator: Mediator, step: int) -> Any:
            for tensor in mediator.read(PORTS[0], "output"):  # type: ignore[attr-defined]
                alive.append(tensor)
                where[name].add(tensor.untyped_storage().data_ptr())
            return None

        return visit

    alive: list[torch.Tensor] = []
    compare({"a": noting("a"), "b": noting("b")}, ["ab"] * 40, graphs)
    assert not where["a"] & where["b"]


@pytest.mark.parametrize("seed", range(30))
def test_any_batches(seed: int, graphs: bool) -> None:
    """Requests leave batches and come back, change their order, and stray."""
    chance = random.Random(seed)
    visits: dict[str, Visit] = {}
    for name in "abcd"[: chance.randint(1, 4)]:
        ports = sorted(chance.sample(range(len(PORTS)), chance.randint(1, 3)))
        visits[name] = reads(*(PORTS[at] for at in ports))
        if chance.random() < 0.5:
            layers = sorted(chance.sample([0, 2], chance.randint(1, 2)))
            visits[name] = reads_items(*((PORTS[at], chance.sample([0, 1], chance.randint(0, 2))) for at in layers))
    if chance.random() < 0.3:
        visits["a"] = strays(chance.randint(5, 60), chance.choice([edits, stops, asks, asks_another]))
    batches: list[list[str]] = []
    names = [*visits]
    while len(batches) < 80:
        if chance.random() < 0.5:
            chance.shuffle(names)
        some = names if chance.random() < 0.7 else names[: chance.randint(1, len(names))]
        batches += [[*some]] * chance.choice([1, 2, 3, 12, 25, 40])
    hub, _ = compare(visits, batches, graphs)
    assert hub.kept
