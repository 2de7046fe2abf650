"""What a trace leaves on its tracer, and what it must not do to the caller's own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo import OutsideBlockError, SamplingError, UnsupportedError
from support.contract import OTHER, PROMPT, assert_serves, prompt_ids, tokens


def test_the_result_is_the_finished_output(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=5, temperature=0) as tracer:
        pass
    result: Any = tracer.result
    completion = result.outputs[0] if hasattr(result, "outputs") else result
    assert completion.text == " Paris.\n\nThe"
    assert completion.finish_reason == "length"
    assert list(result.prompt_token_ids) == prompt_ids(model)


def test_text_inside_the_block_is_the_text_outside(model: Any) -> None:
    with model.trace(OTHER, max_tokens=2, temperature=0) as tracer:
        result = tracer.result
        text = (result.outputs[0].text if hasattr(result, "outputs") else result.text).save()
    outside: Any = tracer.result
    assert text == (outside.outputs[0].text if hasattr(outside, "outputs") else outside.text)
    assert text.startswith(" Tokyo")


def test_the_end_of_text_ends_the_request(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=50, temperature=0) as tracer:
        steps = 0
        for step in tracer.iter[:]:
            if step == 2:
                model.samples = 2  # SmolLM2-Instruct's end of turn
            steps += 1
        steps.save()
    assert steps == len(tokens(tracer)) == 3


def test_nothing_is_there_before_the_with_has_ended(model: Any) -> None:
    trace = model.trace(PROMPT, max_tokens=1, temperature=0)
    with trace as tracer:
        pass
    assert tracer.saves == {}
    fresh = type(tracer)()
    for name in ("saves", "result"):
        with pytest.raises(OutsideBlockError):
            getattr(fresh, name)


@pytest.mark.engine
def test_the_callers_sampling_parameters_are_not_changed(smollm2: Any) -> None:
    from vllm import SamplingParams

    model = smollm2
    params = SamplingParams(max_tokens=2, temperature=0, extra_args={"mine": 1})
    before = repr(params)
    results = []
    for _ in range(2):
        with model.trace(PROMPT, sampling_params=params) as tracer:
            model.model.layers[12].mlp.output[:] = 0
            logits = model.logits.save()
        results.append(logits)
    assert repr(params) == before
    assert params.extra_args == {"mine": 1}
    assert torch.equal(*results)
    assert len(tokens(tracer)) == 2


@pytest.mark.engine
def test_sampling_parameters_that_a_trace_cannot_have(smollm2: Any) -> None:
    from vllm import SamplingParams

    model = smollm2
    with pytest.raises(UnsupportedError, match=r"Use `stop_token_ids`, or `tracer\.stop\(\)`"):
        with model.trace(PROMPT, stop=["\n"]):
            pass
    with pytest.raises(SamplingError, match="not both"):
        with model.trace(PROMPT, sampling_params=SamplingParams(), max_tokens=1):
            pass
    with pytest.raises(SamplingError, match=r"takes a vllm\.SamplingParams, and got dict"):
        with model.trace(PROMPT, sampling_params={"max_tokens": 1}):
            pass
    with pytest.raises(SamplingError, match="`reuse_prefix` takes True or False, and got 'no'"):
        smollm2.trace(PROMPT, reuse_prefix="no")  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match="must not have the key 'invivo'"):
        with model.trace(PROMPT, extra_args={"invivo": b""}):
            pass
    assert_serves(model)


@pytest.mark.engine
def test_other_sampling_arguments_reach_vllm(smollm2: Any) -> None:
    model = smollm2
    with model.trace(PROMPT, max_tokens=20, temperature=0, stop_token_ids=[30], logprobs=2) as tracer:
        pass
    completion = tracer.result.outputs[0]
    assert tokens(tracer) == [7042, 30]
    assert completion.stop_reason == 30
    assert len(completion.logprobs[0]) >= 2
