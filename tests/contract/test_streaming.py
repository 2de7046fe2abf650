"""Asynchronous engines: outputs as they come, what is streamed with them, and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import invivo
from invivo import (
    InvivoWarning,
    MisuseError,
    OutsideBlockError,
    SamplingError,
    SaveError,
    StepError,
    UnsupportedError,
)
from support.contract import OTHER, PROMPT, assert_raised_at, same, stream, tokens
from support.streams import LONG, STEPS, outputs_of, run, streamed_trace

pytestmark = pytest.mark.engine

# --- values


@pytest.mark.parametrize("other", ["smollm2", "local_smollm2"])
def test_streamed_values_are_those_of_a_trace_that_waits(
    async_smollm2: Any, other: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(other)
    with model.trace(PROMPT, **STEPS) as waited:
        expected = list().save()
        for step in waited.iter[:]:
            expected.append(stream(model.model.layers[5]))

    tracer = streamed_trace(async_smollm2)
    outputs = run(outputs_of(tracer))
    assert len(outputs) == len(expected) == 6
    for number, (output, value) in enumerate(zip(outputs, expected, strict=True)):
        assert same(output.saves["h"], value), number
        assert output.saves["token"] == output.outputs[0].token_ids[-1]
        assert len(output.outputs[0].token_ids) == number + 1
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert tokens(tracer) == tokens(waited)


def test_streamed_values_add_up_to_the_final_ones(async_smollm2: Any) -> None:
    tracer = streamed_trace(async_smollm2)
    outputs = run(outputs_of(tracer))
    assert all(set(output.saves) == {"h", "token"} for output in outputs[:-1])
    assert set(outputs[-1].saves) == set(tracer.saves) == {"h", "token", "states"}
    for output, state in zip(outputs, tracer.saves["states"], strict=True):
        assert torch.equal(output.saves["h"], state)
    assert torch.equal(tracer.saves["h"], outputs[-1].saves["h"])
    assert tracer.result is outputs[-1]
    assert tracer.result.outputs[0].text == " Paris.\n\nThe E"


def test_a_streamed_value_is_a_copy_of_its_moment(async_smollm2: Any) -> None:
    model = async_smollm2
    with model.trace(PROMPT, **STEPS) as tracer:
        h = model.model.layers[5].mlp.output.clone()
        h.save(stream=True)
        h[:] = 7
        log = list()
        for step in tracer.iter[:]:
            log.append(step)
            log.save(stream=True)
    outputs = run(outputs_of(tracer))
    assert not torch.equal(outputs[0].saves["h"], torch.full_like(outputs[0].saves["h"], 7))
    assert torch.equal(tracer.saves["h"], torch.full_like(tracer.saves["h"], 7))
    assert [output.saves["log"] for output in outputs] == [list(range(number + 1)) for number in range(6)]


def test_names_of_streamed_values(async_smollm2: Any) -> None:
    model = async_smollm2

    def helper(envoy: Any) -> None:
        invivo.save(envoy.output.sum(), stream=True)

    with model.trace(PROMPT, max_tokens=2, temperature=0) as tracer:
        "early".save(stream=True)
        for layer in model.model.layers[3:6]:
            norm = layer.mlp.output.norm().save(stream=True)
        helper(model.model.layers[7].mlp)
        a = b = model.logits.argmax().save(stream=True)
    first, last = run(outputs_of(tracer))
    assert list(first.saves) == ["value", "norm", "norm[1]", "norm[2]", "model.layers.7.mlp.output", "a", "b"]
    assert first.saves["value"] == "early"
    assert last.saves.keys() == tracer.saves.keys() == {"norm", "a", "b"}
    assert torch.equal(first.saves["norm[2]"], tracer.saves["norm"])


def test_edits_and_the_result_in_the_block(async_smollm2: Any) -> None:
    model = async_smollm2
    paris = model.tokenizer(" Paris")["input_ids"][0]
    with model.trace(OTHER, max_tokens=3, temperature=0) as tracer:
        model.samples = paris
        for step in tracer.iter[1:]:
            pass
        text = tracer.result.outputs[0].text.save()
    outputs = run(outputs_of(tracer))
    assert outputs[0].outputs[0].text == " Paris"
    assert tracer.saves["text"] == tracer.result.outputs[0].text == outputs[-1].saves["text"]


def test_waiting_for_the_end(async_smollm2: Any) -> None:
    async def main() -> None:
        tracer = streamed_trace(async_smollm2)
        saves = await tracer
        assert saves == tracer.saves
        assert len(saves["states"]) == 6
        assert await tracer.backend.collect() is saves
        with pytest.raises(MisuseError, match="were taken before"):
            async for _ in tracer.backend:
                pass

    run(main())


def test_in_a_waiting_engine_a_streamed_save_is_a_save(smollm2: Any, local_smollm2: Any) -> None:
    for model in (smollm2, local_smollm2):
        with model.trace(PROMPT, max_tokens=1, temperature=0) as tracer:
            h = stream(model.model.layers[5]).save(stream=True)
        assert set(tracer.saves) == {"h"}
        with pytest.raises(OutsideBlockError, match='for models with `mode="async"`'):
            tracer.backend


def test_prompts_that_share_a_prefix_do_not_share_it_with_traces(async_smollm2: Any) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(PROMPT, max_tokens=1, temperature=0) as broken:
            model.model.layers[3].mlp.output[:] = 0
            logits = model.logits.save()
        with model.trace(PROMPT, max_tokens=1, temperature=0) as whole:
            logits = model.logits.save()
        first, second = await asyncio.gather(broken, whole)
        assert not same(first["logits"], second["logits"])
        assert model.tokenizer.decode(tokens(whole)) == " Paris"

    run(main())


# --- errors


def test_an_error_of_the_block(async_smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(PROMPT, **LONG) as tracer:
            kept = model.model.layers[2].mlp.output.shape[0].save()
            for step in tracer.iter[:]:
                print("step", step)
                h = model.model.layers[5].mlp.output.save(stream=True)
                if step == 2:
                    h.reshape(7, 7)  # <fails>
        outputs = []
        with pytest.raises(RuntimeError, match="shape") as caught:
            async for output in tracer.backend:
                outputs.append(output)  # noqa: PERF401  # those before the error count
        assert len(outputs) == 2
        assert_raised_at(caught.value, __file__, "fails")
        assert "at port model.layers.5.mlp.output, step 2" in caught.value.__notes__
        assert caught.value.saves["kept"] == 9
        assert caught.value.saves["h"].shape == (1, 576)
        assert tracer.saves == caught.value.saves
        assert len(tokens(tracer)) == 3

    run(main())
    assert capsys.readouterr().out == "step 0\nstep 1\nstep 2\n"


def test_a_warning_of_the_block_comes_with_the_last_output(async_smollm2: Any) -> None:
    model = async_smollm2
    with model.trace(PROMPT, max_tokens=2, temperature=0) as tracer:
        for step in tracer.iter[0:4]:
            token = model.samples.save(stream=True)
    with pytest.warns(InvivoWarning, match="ran 2 of 4 steps"):
        assert len(run(outputs_of(tracer))) == 2


def test_a_value_that_cannot_be_streamed(async_smollm2: Any) -> None:
    model = async_smollm2
    with model.trace(PROMPT, **STEPS) as tracer:
        thing = [object()]
        thing.save(stream=True)  # <unsendable>
    with pytest.raises(SaveError, match=r"`thing\[0\]` cannot be saved") as caught:
        run(outputs_of(tracer))
    assert_raised_at(caught.value, __file__, "unsendable")


def test_stopping(async_smollm2: Any) -> None:
    model = async_smollm2
    with model.trace(PROMPT, **LONG) as tracer:
        for step in tracer.iter[:]:
            number = step
            number.save(stream=True)
            if step == 3:
                tracer.stop()
    outputs = run(outputs_of(tracer))
    assert [output.saves.get("number") for output in outputs] == [0, 1, 2, 3]
    assert tracer.result.outputs[0].finish_reason == "stop"


def test_a_block_that_fails_after_the_request(async_smollm2: Any) -> None:
    model = async_smollm2
    with model.trace(PROMPT, **STEPS) as tracer:
        for step in tracer.iter[:]:
            pass
        model.logits.save(stream=True)
    with pytest.raises(StepError, match="after the request had ended"):
        run(outputs_of(tracer))


def test_what_is_refused(async_smollm2: Any, smollm2: Any) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    with pytest.raises(UnsupportedError, match=r'Make it with `VLLM\(\.\.\., mode="async"\)`'):
        smollm2.trace(PROMPT, blocking=False)
    async_smollm2.trace(PROMPT, blocking=False)
    with pytest.raises(SamplingError, match="every output has all the text so far"):
        async_smollm2.trace(PROMPT, sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA))
    with pytest.raises(SamplingError, match="every step needs one"):
        async_smollm2.trace(PROMPT, stream_interval=3)
    with pytest.raises(UnsupportedError, match="with a body of `pass`"):
        async_smollm2.generate(PROMPT)
    with pytest.raises(MisuseError, match='it is "sync" or "async"'):
        invivo.VLLM("somewhere", mode="threads")  # type: ignore[arg-type]


def test_vllms_own_refusals_reach_whoever_waits(async_smollm2: Any, smollm2: Any) -> None:
    with async_smollm2.trace(PROMPT, max_tokens=1, logit_bias={10**7: 1.0}) as tracer:
        pass
    with pytest.raises(SamplingError, match="out-of-vocab"):
        run(outputs_of(tracer))
    with pytest.raises(SamplingError, match="out-of-vocab"):
        with smollm2.trace(PROMPT, max_tokens=1, logit_bias={10**7: 1.0}):
            pass
