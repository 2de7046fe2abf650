"""Blocks whose ports are served behind the forward cannot tell that: they see and do the same as if served at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invivo.envoy.address import INPUT, OUTPUT, Port, port_at
from invivo.envoy.errors import PortError
from invivo.interleaver import deferring_hub
from invivo.interleaver.deferring_hub import DeferringHub
from invivo.interleaver.hub import Hub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import shares

STEPS = 8
PROMPT = 3


class Block(torch.nn.Module):
    """A layer; its `act` runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
        self.act = torch.nn.Tanh()
        self.down = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(self.act(self.up(self.act(x)))), x + skip


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x, skip)
        return x + skip


PORTS = [
    *(port_at(f"layers.{layer}{part}", kind) for layer in range(3) for part in ("", ".up", ".act", ".down")
      for kind in (INPUT, OUTPUT)),
    port_at("unused", OUTPUT),
]  # fmt: skip


class Visit(NamedTuple):
    """What a block does in a step: it reads a port, and maybe edits what it holds, or goes on when that fails."""

    port: Port
    edits: bool = False
    catches: bool = False


Script = Mapping[int, Sequence[Visit]]
"""What a block does in each of its steps."""


class Run:
    """Blocks with their scripts on the toy, for some steps of an engine.

    Attributes:
        seen: what each block saw, and how it ended.
        order: what all of them saw, one after the other.
        outputs: of the model, by step.
    """

    def __init__(self, scripts: Sequence[Script], begins: Sequence[int], *, late: bool) -> None:
        torch.manual_seed(0)
        self.model = Toy()
        self.hub = DeferringHub(self.model) if late else Hub(self.model)
        self.seen: list[list[object]] = [[] for _ in scripts]
        self.order: list[str] = []
        self.outputs: list[torch.Tensor] = []
        self._computed = [0] * len(scripts)
        mediators = [self._mediator(script, seen) for script, seen in zip(scripts, self.seen, strict=True)]
        for index, mediator in enumerate(mediators):
            mediator.index = index
        for step in range(STEPS):
            for index, mediator in enumerate(mediators):
                if begins[index] == step:
                    self.hub.add(str(index), mediator, None)
            self._step([index for index in range(len(scripts)) if begins[index] <= step])
        for index, mediator in enumerate(mediators):
            self.hub.end(str(index), None)
            self.seen[index].append(repr(mediator.failure))
            self.hub.remove(str(index))
        self.hub.check_integrity()

    def _mediator(self, script: Script, seen: list[object]) -> Mediator:
        def body(mediator: Mediator) -> dict[str, object]:
            for step in mediator.tracer.iter[:]:
                for visit in script.get(step, ()):
                    try:
                        value: Any = mediator.read(visit.port, "output")
                        self.order.append(f"{step} {mediator.index} {visit.port}")
                    except PortError as error:
                        seen.append((step, str(error)))
                        if not visit.catches:
                            raise
                        continue
                    seen.append((step, str(visit.port), deferring_hub.map_tensors(value, torch.clone)))
                    if visit.edits:
                        deferring_hub.tensors_of(value)[0].mul_(-1).add_(1)
            return {}

        return Mediator(self.hub.tree, Turns(0, None), body)

    def _step(self, present: Sequence[int]) -> None:
        counts = [1 if self._computed[index] else PROMPT for index in present]
        starts = [sum(counts[:at]) for at in range(len(counts) + 1)]
        computed = [self._computed[index] for index in present]
        split = shares([str(index) for index in present], starts, computed, [PROMPT] * len(present), starts[-1])
        rows = torch.sin(torch.arange(starts[-1] * 4.0) + len(self.outputs)).reshape(-1, 4)
        with torch.inference_mode():
            self.hub.begin(split)
            if self.hub.needs_modules:
                self.outputs.append(self.hub.run(lambda: self.model(rows.clone())))
            else:
                self.outputs.append(self.model(rows))
            self.hub.forward_done()
            self.hub.finish_step()
        for index, count in zip(present, counts, strict=True):
            self._computed[index] += count


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, tuple | list):
        return isinstance(other, tuple | list) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def compare(scripts: Sequence[Script], begins: Sequence[int] | None = None) -> DeferringHub:
    """Run blocks in both ways, and see that nothing differs."""
    begins = begins or [0] * len(scripts)
    at_once, late = Run(scripts, begins, late=False), Run(scripts, begins, late=True)
    assert same(at_once.seen, late.seen)
    assert at_once.order == late.order
    assert same(at_once.outputs, late.outputs)
    assert isinstance(late.hub, DeferringHub)
    return late.hub


def out(layer: int, part: str = "") -> Port:
    return port_at(f"layers.{layer}{part}", OUTPUT)


def every_step(*visits: Visit) -> Script:
    return dict.fromkeys(range(STEPS), visits)


def test_ports_that_are_only_read_are_served_late() -> None:
    done = compare([every_step(Visit(out(0)), Visit(out(2))), every_step(Visit(out(0, ".up")), Visit(out(2)))])
    assert done.deferred == STEPS - 1 and done.repeated == 0  # the first is the blocks' first


def test_an_edit_is_there_in_the_same_step_and_its_port_cannot_wait_from_then_on() -> None:
    edits = {**every_step(Visit(out(0)), Visit(out(1)), Visit(out(2)))}
    edits[4] = edits[6] = (Visit(out(0)), Visit(out(1), edits=True), Visit(out(2)))
    done = compare([edits, every_step(Visit(out(0)), Visit(out(1)), Visit(out(2)))])
    assert done.repeated == 1


def test_an_edit_is_made_where_it_is_while_other_ports_wait() -> None:
    done = compare([every_step(Visit(out(1), edits=True)), every_step(*(Visit(out(layer)) for layer in range(3)))])
    assert done.deferred == STEPS - 1 and done.repeated == 0


def test_a_port_that_nobody_had_asked_for_has_gone_by() -> None:
    script = {**every_step(Visit(out(0)), Visit(out(2)))}
    script[3] = (Visit(out(0)), Visit(out(1)), Visit(out(2)))
    assert compare([script]).repeated == 1


def test_tries_are_given_up_for_longer_and_longer() -> None:
    odd = {step: (Visit(out(0)), Visit(PORTS[8 + step])) for step in range(STEPS)}
    assert compare([odd]).repeated == 3  # steps 1, 3, 6


def test_a_block_that_comes_later_is_served_at_once_in_its_first_step() -> None:
    script = every_step(Visit(out(0)), Visit(out(2)))
    done = compare([script, script], [0, 3])
    assert done.deferred == STEPS - 2


def test_a_module_that_runs_twice() -> None:
    twice = every_step(Visit(out(1, ".act")), Visit(out(1, ".act")))
    after = every_step(Visit(out(1, ".up")), Visit(out(1, ".act")))
    assert compare([twice, after, every_step(Visit(out(0)), Visit(out(1, ".act")))]).deferred


def test_what_takes_too_much_memory_is_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferring_hub, "_MOST_BYTES", 100)
    compare([every_step(*(Visit(out(layer, ".up")) for layer in range(3))), every_step(Visit(out(2)))])


visits = st.builds(Visit, st.sampled_from(PORTS), st.sampled_from([False] * 9 + [True]), st.booleans())
habits = st.lists(visits, max_size=5)
in_order = st.lists(st.sampled_from(range(len(PORTS) - 1)), max_size=6).map(
    lambda places: [Visit(PORTS[place]) for place in sorted(places)]
)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """The same in every step, but for some."""
    habit = draw(st.one_of(in_order, habits))
    odd = draw(st.dictionaries(st.integers(0, STEPS - 1), st.one_of(in_order, habits), max_size=3))
    return {**every_step(*habit), **odd}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(scripts(), st.integers(0, 4)), min_size=1, max_size=4), st.sampled_from([150, 1 << 20]))
def test_nobody_can_tell(blocks: list[tuple[Script, int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferring_hub, "_MOST_BYTES", most)
        compare([script for script, _ in blocks], [begin for _, begin in blocks])
