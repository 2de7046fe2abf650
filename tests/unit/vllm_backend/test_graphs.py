"""Captured forwards: what blocks read and write there is what they would, module by module.

The graphs are made up (`support.fake_graph`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from invivo.envoy.address import INPUT, OUTPUT, Port, port_at
from invivo.interleaver.hub import Hub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import shares
from invivo.vllm_backend import graphs
from invivo.vllm_backend.graphs import Graphs
from support.fake_graph import FakeGraph
from support.fused_toy import WIDTH, Again, Model

ROWS, STEPS = 3, 8
Body = Callable[[Mediator, list[torch.Tensor]], None]


class Engine:
    """Decodes a batch of requests, with graphs or without."""

    def __init__(self, *, pieces: bool, model: type[Model] = Model) -> None:
        torch.manual_seed(0)
        FakeGraph.made = 0
        self.model = model().train(False)
        self.hub = Hub(self.model, compiled=True)
        self.graphs = Graphs(self.model, FakeGraph) if pieces else None
        self.input = torch.zeros(ROWS + 1, WIDTH)
        self.calls = self.entered = 0

    def add(self, request: str, body: Body, seen: list[torch.Tensor], *, alone: bool = True) -> Mediator:
        def run(mediator: Mediator) -> dict[str, object]:
            body(mediator, seen)
            return {}

        mediator = Mediator(self.hub.tree, Turns(0, None, ()), run)
        mediator.alone, mediator.index = alone, ord(request)
        self.hub.add(request, mediator, None)
        return mediator

    def call(self) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.model(self.input)
        return found

    def step(self, number: int) -> torch.Tensor:
        with torch.inference_mode():
            torch.manual_seed(number)
            self.input.copy_(torch.randn(ROWS + 1, WIDTH))
            names = ["a", "b", "c"]
            split = shares(names, range(ROWS + 1), [number] * ROWS, [1] * ROWS, ROWS)
            entering = self.graphs.expected(self.hub, split, ()) if self.graphs is not None else []
            self.entered += len(entering)
            self.hub.begin(split, entering)
            self.hub.pad(ROWS + 1)
            output: Any
            if self.graphs is not None and (entering or self.hub.needs_modules) and self.hub.learned is not None:
                output = self.graphs.run(ROWS + 1, self.hub, lambda _: self.call, entering)
            else:
                output = self.call()
            self.hub.forward_done()
            self.hub.finish_step()
            return output.clone()  # type: ignore[no-any-return]


def both(*bodies: Body, steps: int = STEPS, model: type[Model] = Model, alone: bool = True) -> Engine:
    """Run blocks with graphs and without, and assert that they see and cause the same."""
    results = []
    for pieces in (False, True):
        engine = Engine(pieces=pieces, model=model)
        seen: list[list[torch.Tensor]] = [[] for _ in bodies]
        pairs = zip("abc", zip(bodies, seen, strict=True), strict=False)
        mediators = [engine.add(name, *pair, alone=alone) for name, pair in pairs]
        outputs = [engine.step(number) for number in range(steps)]
        for mediator in mediators:
            mediator.end(None)
        failures = [(type(mediator.failure), str(mediator.failure)) for mediator in mediators]
        results.append((outputs, seen, failures))
        for name, _ in zip("abc", bodies, strict=False):
            engine.hub.remove(name)
        engine.hub.check_integrity()
    (outputs, seen, failures), (others, again, same) = results
    assert failures == same
    assert all(torch.equal(one, other) for one, other in zip(outputs, others, strict=True))
    for one, other in zip(seen, again, strict=True):
        assert len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    return engine


def out(address: str) -> Port:
    return port_at(address, OUTPUT)


def every_step(visit: Callable[[Mediator, list[torch.Tensor], int], None]) -> Body:
    def body(mediator: Mediator, seen: list[torch.Tensor]) -> None:
        for step in count():
            if step and not mediator.advance(step):
                return
            visit(mediator, seen, step)

    return body


@every_step
def reads(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
    seen.append(mediator.read(out("layers.1.mlp"), "output"))  # type: ignore[arg-type]
    hidden, residual = mediator.read(out("layers.1"), "output")  # type: ignore[misc]
    seen.extend([hidden, residual])


@every_step
def edits(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
    (x, residual), _ = mediator.read(port_at("layers.1", INPUT), "inputs")  # type: ignore[misc]
    seen.append(x.clone())
    residual += step
    hidden = mediator.read(out("layers.1.attn"), "output")
    hidden *= 2  # type: ignore[operator]
    mediator.write(out("layers.2"), "output", tuple(part * 0.5 for part in mediator.read(out("layers.2"), "output")))  # type: ignore[attr-defined]


def test_reads_and_edits() -> None:
    engine = both(reads, edits)
    assert engine.calls == 1 + 2 + 1  # learned, seen twice, and captured
    assert engine.graphs is not None and len(engine.graphs._forwards) == 1
    assert FakeGraph.made == 1 + 3  # a break at each of the ports that are edited
    assert (engine.graphs.replayed, engine.graphs.missed) == (STEPS - 3, 0)


def test_ports_that_are_only_read_need_no_break() -> None:
    engine = both(reads, reads)
    assert engine.calls == 1 + 2 + 1 and FakeGraph.made == 1
    assert engine.entered == 2 * (STEPS - 4)  # and the step can begin behind the graph


def test_a_step_that_begins_behind_the_forward_may_be_another_one() -> None:
    @every_step
    def changes(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        if step == 5:
            seen.append(mediator.read(out("layers.1.attn"), "output"))  # type: ignore[arg-type]
        elif step != 9:
            seen.append(mediator.read(out("layers.0.mlp"), "output"))  # type: ignore[arg-type]

    engine = both(changes, steps=14)
    assert engine.graphs is not None and engine.graphs.missed == 1

    @every_step
    def edits_first(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        hidden = mediator.read(out("layers.0.mlp"), "output")
        if step == 7:
            hidden *= 2  # type: ignore[operator]
            seen.append(mediator.read(out("layers.1.attn"), "output"))  # type: ignore[arg-type]
        seen.append(hidden)  # type: ignore[arg-type]

    both(edits_first, changes, steps=14)
    assert both(changes, reads, steps=14, alone=False).entered == 0


def test_blocks_that_edit_begin_the_step_where_the_graph_breaks_off() -> None:
    @every_step
    def edits(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        hidden, residual = mediator.read(out("layers.1"), "output")  # type: ignore[misc]
        if step == 9:
            seen.append(mediator.read(out("layers.1.mlp"), "output") if step % 2 == 0 else hidden)  # type: ignore[arg-type]
        elif step == 10:
            seen.append(hidden)
            return
        hidden += step
        residual[:] *= 2
        seen.append(mediator.read(out("layers.2.attn"), "output"))  # type: ignore[arg-type]

    @every_step
    def elsewhere(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        address = "layers.0.attn" if step == 11 else "layers.1"
        seen.append(mediator.read(out(address), "output")[0])  # type: ignore[index]

    engine = both(edits, reads, steps=14)
    assert engine.entered >= 7
    assert both(edits, edits, elsewhere, steps=16).entered >= 20
    assert both(edits, edits, steps=14, alone=False).entered == 0


def test_what_was_read_stays_what_it_was() -> None:
    @every_step
    def keeps(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        (x, residual), kwargs = mediator.read(port_at("layers.1", INPUT), "inputs")  # type: ignore[misc]
        hidden, after = mediator.read(out("layers.1"), "output")  # type: ignore[misc]
        x *= 3  # has passed, so this is no edit
        seen.extend([x, residual, hidden, after, mediator.read(out("layers.2.mlp"), "output")])  # type: ignore[list-item]

    both(keeps, reads)
    assert FakeGraph.made == 1


def at_step(number: int, change: Callable[[Mediator], None]) -> Body:
    """Reads in every step, and edits in one of them."""

    @every_step
    def body(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        seen.append(mediator.read(out("layers.0"), "output")[1])  # type: ignore[index]
        hidden = mediator.read(out("layers.1.mlp"), "output")
        if step >= number:
            change(mediator)
        seen.append(hidden)  # type: ignore[arg-type]
        seen.append(mediator.read(out("layers.2"), "output")[0])  # type: ignore[index]

    return body


def doubles(mediator: Mediator) -> None:
    mediator.write(out("layers.1.mlp"), "output", 2 * mediator.read(out("layers.1.mlp"), "output"))  # type: ignore[operator]


@pytest.mark.parametrize("alone", [True, False])
def test_an_edit_where_nobody_edited_runs_the_forward_again(alone: bool) -> None:
    engine = both(reads, at_step(5, doubles), reads, steps=12, alone=alone)
    assert engine.graphs is not None
    assert engine.calls == 1 + 2 + 1 + 1 + 2 + 1  # again, and captured anew, with a break
    assert FakeGraph.made == 1 + 2
    assert (engine.graphs.replayed, engine.graphs.missed) == (7, 1)


def test_a_forward_without_breaks_is_kept_for_those_that_do_not_edit() -> None:
    engine = Engine(pieces=True)
    for edits_from, made in ((99, 1), (0, 3), (99, 3), (0, 3)):
        engine.add("a", at_step(edits_from, doubles), [])
        [engine.step(number) for number in range(6)]
        engine.hub.remove("a")
        assert FakeGraph.made == made


def test_edits_of_several_blocks_behind_the_forward() -> None:
    def halves(mediator: Mediator) -> None:
        hidden = mediator.read(out("layers.1.mlp"), "output")
        hidden *= 0.5  # type: ignore[operator]

    both(at_step(5, doubles), at_step(6, halves), at_step(5, halves), steps=12)


def test_blocks_that_share_something_have_their_turns_in_the_order_of_the_ports() -> None:
    shared: list[tuple[int, int, str]] = []

    def noting(number: int) -> Body:
        @every_step
        def body(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
            for address in ("layers.0", "layers.1", "layers.2"):
                seen.append(mediator.read(out(address), "output")[0])  # type: ignore[index]
                shared.append((step, number, address))

        return body

    both(noting(0), noting(1), alone=False)
    assert shared[: len(shared) // 2] == shared[len(shared) // 2 :]


@pytest.mark.parametrize("step", [0, 6])
def test_a_module_that_is_called_several_times(step: int) -> None:
    @every_step
    def last_of_them(mediator: Mediator, seen: list[torch.Tensor], number: int) -> None:
        for address in ("embed", "layers.0.mlp", "embed", "layers.1.mlp", "embed"):
            value = mediator.read(out(address), "output")
            if address == "embed" and number == step:
                value += 1  # type: ignore[operator]
            seen.append(value)  # type: ignore[arg-type]

    both(last_of_them, reads, model=Again, steps=12)


def test_a_block_that_stops_ends_or_fails_behind_the_forward() -> None:
    def ends(mediator: Mediator) -> None:
        mediator.stop()

    def fails(mediator: Mediator) -> None:
        doubles(mediator)
        raise ValueError("as it should")

    def stops_edited(mediator: Mediator) -> None:
        doubles(mediator)
        mediator.stop()

    for ending in (ends, fails, stops_edited):
        both(at_step(6, ending), reads, steps=10)


def test_a_block_that_calls_a_module_behind_the_forward() -> None:
    @every_step
    def calls(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        hidden = mediator.read(out("layers.0.mlp"), "output")
        seen.append(mediator.call("layers.2.mlp", (hidden,), {}))  # type: ignore[arg-type]
        seen.append(mediator.read(out("layers.1.mlp"), "output"))  # type: ignore[arg-type]

    both(calls, reads)
    assert FakeGraph.made == 1


def test_what_misses_has_to_be_earned_by_more_steps() -> None:
    @every_step
    def wanders(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        ports = [out("layers.0.mlp"), out(f"layers.{1 + step % 3 // 2}.mlp")]
        seen.extend(mediator.read(port, "output") for port in ports)  # type: ignore[misc]

    engine = both(wanders, steps=30, alone=False)
    assert engine.graphs is not None
    assert 0 < engine.graphs.missed == sum(engine.graphs._misses.values()) < 6
    both(wanders, steps=30)


def test_large_forwards_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_BYTES", (ROWS + 1) * WIDTH * 4 * 3 - 1)
    engine = both(reads)
    assert engine.graphs is not None and not engine.graphs._forwards and engine.calls == STEPS + 1


def test_one_that_asks_for_another_port_in_the_middle() -> None:
    @every_step
    def wanders(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        hidden = mediator.read(out("layers.0.mlp"), "output")
        hidden += 1.0  # type: ignore[operator]
        seen.append(mediator.read(out("layers.1.attn" if step == 6 else "layers.1.mlp"), "output"))  # type: ignore[arg-type]

    engine = both(wanders, reads)
    assert engine.calls == 1 + 2 + 1 + 1 + 1  # what was captured is forgotten


def test_one_that_asks_for_another_port_from_the_beginning() -> None:
    @every_step
    def changes(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        seen.append(mediator.read(out(f"layers.{step % 2}.mlp"), "output"))  # type: ignore[arg-type]

    engine = both(changes)
    assert engine.graphs is not None and len(engine.graphs._forwards) == 2


def test_fewer_ports_are_served_by_the_same_pieces() -> None:
    @every_step
    def stops_looking(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        if step < 5:
            seen.append(mediator.read(out("layers.0.mlp"), "output"))  # type: ignore[arg-type]

    assert both(stops_looking, reads).calls == 1 + 2 + 1


def test_errors_are_the_same() -> None:
    @every_step
    def asks_late(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        seen.append(mediator.read(out("layers.2.mlp"), "output"))  # type: ignore[arg-type]
        if step == 6:
            mediator.read(out("layers.0.mlp"), "output")

    both(asks_late, reads)


def test_no_more_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_KEPT", 1)

    @every_step
    def changes(mediator: Mediator, seen: list[torch.Tensor], step: int) -> None:
        seen.append(mediator.read(out(f"layers.{step % 2}.mlp"), "output"))  # type: ignore[arg-type]

    engine = both(changes)
    assert engine.graphs is not None and len(engine.graphs._forwards) == 1


def test_a_capture_that_fails_is_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeGraph):
        def capture_end(self) -> None:
            super().capture_end()
            raise RuntimeError("not captured")

    engine = Engine(pieces=True)
    engine.graphs = Graphs(engine.model, Broken)
    seen: list[torch.Tensor] = []
    mediator = engine.add("a", reads, seen)
    for number in range(STEPS):
        engine.step(number)
    assert len(seen) == 3 * STEPS and engine.graphs._unfit and "without CUDA graphs" in caplog.text
    mediator.end(None)
    engine.hub.remove("a")
    engine.hub.check_integrity()
