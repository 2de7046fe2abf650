"""Logits that are there when blocks begin the step: those that share nothing take them in the same turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from invivo.envoy.address import LOGITS, SAMPLES, port_at
from invivo.interleaver.hub import Hub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.supply import Supply
from invivo.interleaver.windows import shares

PORT, TOKENS = port_at("", LOGITS), port_at("", SAMPLES)
STEPS, VOCABULARY = 4, 6
Visit = Callable[[Mediator, int], object]


class Counting(Mediator):
    """Counts how often it hands over."""

    turns = 0

    def _turn(self, *args: object, **kwargs: object) -> None:
        self.turns += 1
        super()._turn(*args, **kwargs)  # type: ignore[arg-type]


def run(visits: list[Visit], *, late: bool, alone: bool = True) -> tuple[list[object], list[Counting]]:
    """Blocks that visit each step; what they return, and the logits and samples that the engine goes on with."""
    hub = Hub(torch.nn.Linear(2, 2), compiled=True)
    found: list[object] = []
    mediators = []
    for index, visit in enumerate(visits):

        def body(mediator: Mediator, visit: Visit = visit) -> dict[str, object]:
            for step in range(STEPS):
                if step and not mediator.advance(step):
                    break
                found.append((mediator.index, step, visit(mediator, step)))
            return {}

        mediator = Counting(hub.tree, Turns(0, None, ()), body)
        mediator.index, mediator.alone = index, alone
        mediators.append(mediator)
        hub.add(str(index), mediator, VOCABULARY)
    names = [str(index) for index in range(len(visits))]
    for step in range(STEPS):
        with torch.inference_mode():
            split = shares(names, range(len(names) + 1), [step] * len(names), [1] * len(names), len(names))
            logits = torch.arange(len(names) * VOCABULARY, dtype=torch.float32).reshape(len(names), VOCABULARY)
            hub.begin(split, names if late and step else ())
            hub.forward_done()
            if late and step:
                hub.supply(Supply([(PORT, logits)], {}, -1), names)
                hub.enter(names)
            edited = hub.fire(PORT, logits)
            hub.end_supply()
            used = logits if edited is None else edited
            assert isinstance(used, torch.Tensor)
            hub.fire(TOKENS, used.argmax(-1))
            found.append(used.tolist())
            hub.finish_step()
    for name, mediator in zip(names, mediators, strict=True):
        mediator.end(None)
        found.append((type(mediator.failure), str(mediator.failure), str(mediator.failed_at), mediator.edited))
        hub.remove(name)
    hub.check_integrity()
    return found, mediators


def reads(mediator: Mediator, step: int) -> object:
    return mediator.read(PORT, "logits").tolist()  # type: ignore[attr-defined]


def edits(mediator: Mediator, step: int) -> object:
    logits = mediator.read(PORT, "logits")
    logits[:, step] += 100  # type: ignore[index]
    return mediator.read(TOKENS, "samples").tolist()  # type: ignore[attr-defined]


def fails(mediator: Mediator, step: int) -> object:
    mediator.write(PORT, "logits", torch.zeros(1, VOCABULARY + (step == 2)))
    return None


def only_samples(mediator: Mediator, step: int) -> object:
    return mediator.read(TOKENS, "samples").tolist()  # type: ignore[attr-defined]


def goes_back(mediator: Mediator, step: int) -> object:
    mediator.read(TOKENS if step == 2 else PORT, "samples")
    return mediator.read(PORT, "logits").tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("alone", [True, False])
def test_blocks_see_and_cause_the_same(alone: bool) -> None:
    visits: list[Visit] = [reads, edits, fails, only_samples, goes_back]
    expected, _ = run(visits, late=False)
    found, _ = run(visits, late=True, alone=alone)
    assert sorted(map(str, found)) == sorted(map(str, expected))


def test_one_turn_does() -> None:
    assert [mediator.turns for mediator in run([reads], late=False)[1]] == [2 * STEPS]
    assert [mediator.turns for mediator in run([reads], late=True)[1]] == [STEPS + 1]


def test_copies_are_private() -> None:
    kept: list[torch.Tensor] = []

    def keeps(mediator: Mediator, step: int) -> None:
        logits = mediator.read(PORT, "logits")
        assert isinstance(logits, torch.Tensor)
        kept.append(logits)
        mediator.advance(step + 1)
        logits.zero_()  # it has passed

    found, _ = run([keeps, reads], late=True)
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == len(kept)
    expected, _ = run([reads, reads], late=False)
    assert [value for value in found if isinstance(value, list)] == [v for v in expected if isinstance(v, list)]
