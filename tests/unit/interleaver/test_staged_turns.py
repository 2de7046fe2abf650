"""Stages of a pipeline: blocks that share something, and what a block is refused and catches, are the same in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from invivo.envoy.errors import PortNotReachedError, PortPassedError, UnsupportedError
from invivo.interleaver.group import Groups, Member
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.stages import Elsewhere
from invivo.tracer.block import Group
from support.toy_pipeline import Pipeline


def places(size: int) -> list[Sequence[Member]]:
    """For each block of a trace, its place in each stage; they have a barrier, so the order of turns matters."""
    stages = [Groups(), Groups()]
    return [
        [groups.join(Group("trace", at, size, (), (), (("meet", size),))) for groups in stages] for at in range(size)
    ]


def test_blocks_that_share_an_object_have_their_turns_in_one_order_in_all_stages() -> None:
    pipeline = Pipeline()
    orders: list[list[object]] = [[], []]

    def first_block(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        for step in mediator.tracer.iter[:]:
            for at in (1, 2):
                model.layers[at].output
                orders[stage].append(("first", step, at))
        return {}

    def second_block(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        for step in mediator.tracer.iter[:]:
            for at in (0, 1, 2, 3):
                model.layers[at].output
                orders[stage].append(("second", step, at))
        return {}

    one, other = places(2)
    blocks = [*pipeline.add("a", first_block, one), *pipeline.add("b", second_block, other)]
    for _ in range(3):
        pipeline.step()
    for name in "ab":
        pipeline.end(name)
    assert all(block.failure is None for block in blocks)
    turns = [("second", 0), ("first", 1), ("second", 1), ("first", 2), ("second", 2), ("second", 3)]
    assert orders[0] == orders[1] == [(name, step, at) for step in range(3) for name, at in turns]


def test_what_a_block_that_has_ended_left_in_a_shared_object_is_in_all_stages_in_the_next_step() -> None:
    pipeline = Pipeline()
    boxes: list[list[torch.Tensor]] = [[], []]

    def gives(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        boxes[stage].append(model.layers[3].output[-1])
        return {}

    def takes(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        for step in mediator.tracer.iter[:]:
            value = model.layers[0].output
            if step:
                value += boxes[stage][0]
        return {}

    one, other = places(2)
    blocks = [*pipeline.add("a", gives, one), *pipeline.add("b", takes, other)]
    pipeline.step()
    assert pipeline.step("b")[-1, 0] == (2 + 16) * 8
    for name in "ab":
        pipeline.end(name)
    assert all(block.failure is None for block in blocks)
    assert [len(box) for box in boxes] == [1, 1]


@pytest.mark.parametrize("last", [False, True])
def test_what_a_block_is_refused_and_catches_it_is_refused_in_all_stages(last: bool) -> None:
    pipeline = Pipeline()

    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        seen: list[object] = []
        for step in mediator.tracer.iter[:]:
            seen.append(float(model.layers[1].output[-1, 0]))
            for early in (model.layers[0], model.layers[1]):
                try:
                    early.input
                except PortPassedError:
                    seen.append("passed")
                if step == 0:
                    break  # until the order is known, such an error is raised when the forward of the stage is over
            seen.append(float(model.layers[2].output[-1, 0]))
            try:
                model.layers[0].output
            except PortPassedError:
                seen.append("passed")
            try:
                model.head(None)
            except TypeError:
                seen.append("failed in the module")
            if not last:
                seen.append(float(model.layers[3].output[-1, 0]))
            try:
                model.head.output
            except PortNotReachedError:
                seen.append("not reached")
        return {"seen": seen}

    first, late = pipeline.add("a", body)
    for _ in range(3):
        pipeline.step()
    pipeline.end("a")
    assert first.failure is None and late.failure is None
    step = ["passed", 8.0, "passed", "failed in the module", *([] if last else [16.0]), "not reached"]
    assert first.scope["seen"] == late.scope["seen"] == [4.0, *step, *([4.0, "passed", *step] * 2)]


def test_an_attribute_error_of_another_stage_stays_one() -> None:
    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        model.layers[0].output
        if stage == 0:
            raise AttributeError("mine")
        model.layers[2].output
        return {}

    failure = Pipeline().failure_of(body)
    assert type(failure) is AttributeError and failure.args == ("mine",)


def test_modules_of_other_stages_have_nothing() -> None:
    with pytest.raises(UnsupportedError, match="`weight` of a ParallelLMHead cannot be had here"):
        Elsewhere("ParallelLMHead").weight
    assert not hasattr(Elsewhere("ParallelLMHead"), "__wrapped__")
