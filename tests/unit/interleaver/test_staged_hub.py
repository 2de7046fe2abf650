"""Two stages of a toy model in one process: what their blocks read, write and are told, and where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo.envoy.errors import PortPassedError, RanksError, WriteError
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.stages import Places
from support.toy_pipeline import ROWS, Body, Pipeline


def test_reads_and_edits_in_both_stages_are_as_in_one() -> None:
    pipeline = Pipeline()

    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        early = model.layers[0].output
        early[0] += 1
        late = model.layers[2].output
        late[1] = 0
        return {"early": early, "late": late, "all": model.layers[3].output}

    first, last = pipeline.add("a", body)
    out = pipeline.step()
    expected = torch.full((ROWS, 2), 16.0)
    expected[0] += 8
    expected[1] = 0
    assert torch.equal(out, expected)
    assert last.scope["early"].tolist() == [[3, 3], [2, 2], [2, 2]]  # type: ignore[attr-defined]
    assert torch.equal(last.scope["all"], expected)  # type: ignore[arg-type]
    assert first.edited and last.edited
    pipeline.end("a")
    assert torch.equal(first.scope["all"], expected)  # type: ignore[arg-type]  # it has been told


def test_later_steps_know_what_later_stages_read() -> None:
    pipeline = Pipeline()

    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        late = None
        for _ in mediator.tracer.iter[:]:
            if late is not None:
                model.layers[1].output += late[-1]
            late = model.layers[3].output
        return {"late": late}

    _, last = pipeline.add("a", body)
    assert pipeline.step()[-1, 0] == 16
    assert pipeline.step()[-1, 0] == (4 + 16) * 4
    assert pipeline.step()[-1, 0] == (4 + 80) * 4
    pipeline.end("a")
    assert last.failure is None and last.scope["late"].tolist() == [[336, 336]]  # type: ignore[attr-defined]


def writes(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[0].output[0] += stage
    return {"seen": model.layers[2].output}


def writes_last(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[0].output[0] += stage
    return {}


def reads_more(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[0].output
    if stage == 0:
        model.layers[1].output
    return {}


def reads_more_in_a_loop(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    for _ in mediator.tracer.iter[:]:
        reads_more(model, mediator, stage)
    return {}


def reads_others(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[stage].output
    return {"seen": model.layers[2].output}


def ends(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[0].output
    if stage == 0:
        return {}
    return {"seen": model.layers[2].output}


def stops(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    for _ in mediator.tracer.iter[:]:
        model.layers[0].output
        if stage == 0:
            mediator.tracer.stop()
    return {}


def changes_after_a_call(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    value = model.layers[1].output
    model.head(value)
    value[0] = 7
    return {}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (writes, r"wrote at layers\.0\.output in stage 0"),
        (writes_last, r"wrote at layers\.0\.output in stage 0"),
        (reads_more, r"asked for layers\.1\.output in stage 0"),
        (reads_more_in_a_loop, r"asked for layers\.1\.output in stage 0"),
        (reads_others, r"asked for layers\.1\.output, and for layers\.0\.output at the same place in stage 0"),
        (ends, r"has ended in an earlier stage of the pipeline, and in stage 1 it asks for layers\.2\.output"),
        (stops, r"has ended in an earlier stage of the pipeline, and in stage 1 it goes on"),
        (changes_after_a_call, r"change the value before that call"),
    ],
)
def test_a_block_that_differs_between_stages_is_an_error(body: Body, text: str) -> None:
    failure = Pipeline().failure_of(body)
    assert failure is not None
    with pytest.raises(RanksError, match=text):
        raise failure


@pytest.mark.parametrize("wraps", [False, True])
def test_an_exception_in_one_stage_only(wraps: bool) -> None:
    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        for _ in mediator.tracer.iter[:]:
            model.layers[0].output
            if stage == 0:
                raise KeyError("mine")
            if wraps:
                return {}
        return {}

    failure = Pipeline().failure_of(body)
    assert type(failure) is KeyError and failure.args == ("mine",)


def resizes(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[0].output.resize_(1)
    return {"seen": model.layers[2].output}


def resizes_last(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[0].output.resize_(1)
    return {}


def changes_and_raises(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
    model.layers[0].output[:] = 3
    if stage == 0:
        raise WriteError("mine")
    return {"seen": model.layers[2].output}


@pytest.mark.parametrize("body", [resizes, resizes_last, changes_and_raises])
def test_what_a_block_is_ended_by_when_it_leaves_a_port_of_an_earlier_stage(body: Body) -> None:
    assert type(Pipeline().failure_of(body)) is WriteError


def test_a_block_that_catches_what_it_may_not_write_does_so_in_both_stages() -> None:
    pipeline = Pipeline()

    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        caught = []
        for _ in mediator.tracer.iter[:]:
            model.layers[0].output.resize_(1)
            try:
                model.layers[2].output
            except WriteError as error:
                caught.append(error)
            model.layers[2].output
            model.samples
            try:
                model.samples = 1
            except WriteError as error:
                caught.append(error)
        return {"caught": caught}

    first, last = pipeline.add("a", body)
    for mediator in (first, last):
        mediator.fixed_samples = "not these"
    pipeline.step()
    pipeline.step()
    pipeline.end("a")
    assert first.failure is None and last.failure is None
    for mediator in (first, last):
        shapes, samples = str(mediator.scope["caught"][0]), str(mediator.scope["caught"][1])  # type: ignore[index]
        assert len(mediator.scope["caught"]) == 4  # type: ignore[arg-type]
        assert "that the model cannot go on with" in shapes and samples == "not these"


def test_tables_of_all_stages_are_known_in_each() -> None:
    places = Places(1, [{}, {}], [{"embed": 100}, {"head": 90}])
    assert places.tables == {"embed": 100, "head": 90}


def test_both_stages_stop() -> None:
    pipeline = Pipeline()

    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        for step in mediator.tracer.iter[:]:
            model.layers[0].output
            if step == 1:
                mediator.tracer.stop()
        return {}

    first, last = pipeline.add("a", body)
    pipeline.step()
    pipeline.step()
    assert first.stopped and last.stopped and last.failure is None
    pipeline.end("a")


def test_a_call_of_a_later_module_leaves_the_port_as_it_is() -> None:
    pipeline = Pipeline()

    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        seen = []
        for _ in mediator.tracer.iter[:]:
            value = model.layers[1].output
            value[-1] = 5
            seen.append(model.head(value)[-1])
            assert model.layers[1].output is value
            seen.append(model.layers[2].output[-1])
        return {"seen": seen}

    _, last = pipeline.add("a", body)
    for _ in range(2):
        assert pipeline.step()[-1, 0] == 20
    pipeline.end("a")
    assert last.failure is None
    assert [one.tolist() for one in last.scope["seen"]] == [[10, 10]] * 4  # type: ignore[attr-defined]


def test_an_early_port_after_a_late_one() -> None:
    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        model.layers[3].output
        model.layers[0].output
        return {}

    failure = Pipeline().failure_of(body)
    assert type(failure) is PortPassedError and "an earlier stage" in str(failure)


def test_a_value_that_cannot_be_sent_ends_the_blocks_and_not_the_engine() -> None:
    pipeline = Pipeline()

    class Odd:
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    def body(model: Any, mediator: Mediator, stage: int) -> dict[str, object]:
        model.layers[0].output
        mediator.script.read[-1].value = Odd()  # type: ignore[attr-defined]
        model.layers[2].output
        return {}

    _, last = pipeline.add("a", body)
    pipeline.step()
    assert last.failure is not None and "not this one" in str(last.failure)
    pipeline.end("a")
