"""Rule 8, `stop`: the request ends with the token of that step and keeps its saves."""

from __future__ import annotations

from typing import Any

import pytest

from invivo import InvivoWarning, StepError
from support.contract import PROMPT, assert_serves, prompt_ids, same, stream, tokens
from support.reference import Reference


@pytest.mark.parametrize("at", [0, 1, 3])
def test_stop_ends_the_request_in_its_step(model: Any, reference: Reference, at: int) -> None:
    with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
        logits = list().save()
        for step in tracer.iter[:]:
            logits.append(model.logits)
            if step == at:
                tracer.stop()
    expected = reference.run(prompt_ids(model), at + 1, record=False)
    assert tokens(tracer) == expected.tokens
    assert all(same(a, step.logits) for a, step in zip(logits, expected.steps, strict=True))
    assert len(logits) == at + 1
    assert_serves(model)


def test_stop_in_the_middle_of_a_forward(model: Any, reference: Reference) -> None:
    with pytest.warns(InvivoWarning, match="left the block before this save"):
        with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
            h = stream(model.model.layers[4]).save()
            tracer.stop()
            never = (1).save()
    assert same(h, reference.run(prompt_ids(model), 1).steps[0].output("model.layers.4"))
    assert len(tokens(tracer)) == 1
    assert "never" not in locals()


def test_stop_before_any_port(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
        x = (1).save()
        tracer.stop()
    assert x == 1
    assert len(tokens(tracer)) == 1


def test_stop_says_why_the_request_ended(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
        tracer.stop()
    result: Any = tracer.result
    completion = result.outputs[0] if hasattr(result, "outputs") else result
    assert completion.finish_reason == "stop"


def test_edits_of_the_step_that_stops_count(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
        model.samples = 1234
        tracer.stop()
    assert tokens(tracer) == [1234]


@pytest.mark.engine
def test_stop_under_min_tokens(smollm2: Any) -> None:
    model = smollm2
    with model.trace(PROMPT, max_tokens=50, min_tokens=20, temperature=0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            if step == 2:
                tracer.stop()
    assert len(tokens(tracer)) == 3


def test_finally_and_with_run_when_a_block_stops(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
        log = list().save()
        try:
            log.append("in")
            tracer.stop()
        except Exception:
            log.append("caught")
        finally:
            log.append("finally")
    assert log == ["in", "finally"]


def test_stop_after_the_end_is_an_error(model: Any) -> None:
    with pytest.raises(StepError, match="came after the request had ended"):
        with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
            tracer.result
            tracer.stop()
    assert_serves(model)


def test_stop_in_a_helper(model: Any) -> None:
    def probe(tracer: Any, step: int) -> None:
        if step == 1:
            tracer.stop()

    with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            probe(tracer, step)
    assert len(tokens(tracer)) == 2
