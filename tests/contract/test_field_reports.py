"""What users of neighbouring tools ran into, each as a test with the right value (F1 ... F34 of the field reports).

F3, F15 and F19, which are about two workers, are in `test_tensor_parallel`. F13, the gate of MoE layers, is in
`test_architectures` with every other port of the Mixtral checkpoint. F5 and F6, a plain script whose first trace starts
the engine, are in `tests/process`; the rest of F6 is the capture matrix of `tests/unit/tracer`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from invivo import InvivoWarning, PortPassedError, UnknownNameError, UnsupportedError, WriteError
from support.batch import Batch
from support.contract import OTHER, PROMPT, assert_raised_at, assert_serves, prompt_ids, rows, same, stream, tokens
from support.reference import Edit, Reference

PROMPTS = [PROMPT, OTHER, "Once upon a time there was", "def fibonacci(n):", "Water boils at"]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def alone(reference: Reference, model: Any, prompt: str, count: int) -> list[int]:
    """The greedy tokens of a prompt by itself."""
    return reference.run(prompt_ids(model, prompt), count, record=False).tokens


def test_f1_stop_ends_the_request_and_the_next_trace_works(model: Any) -> None:
    for _ in range(3):
        with model.trace(PROMPT, max_tokens=40, **GREEDY) as tracer:
            h = rows(model.model.layers[3].mlp.output).save()
            tracer.stop()
        assert h.shape == (9, 576)
        assert len(tokens(tracer)) == 1
        assert_serves(model)


@pytest.mark.engine
def test_f2_an_exception_leaves_requests_in_the_same_batch_alone(smollm2: Any, reference: Reference) -> None:
    model, batch = smollm2, Batch(smollm2)
    batch.plain(PROMPTS[2], max_tokens=12, **GREEDY)
    with batch.traced(PROMPT, max_tokens=12, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            h = stream(model.model.layers[7]).save()
            if step == 3:
                torch.zeros(2) @ torch.zeros(3)  # <in a batch>
    with batch.traced(OTHER, max_tokens=12, **GREEDY) as tracer:
        norms = list().save()
        for _ in tracer.iter[:]:
            norms.append(model.logits)
    batch.plain(PROMPTS[3], max_tokens=12, **GREEDY)
    first, failed, traced, last = batch.run()
    assert isinstance(failed.error, RuntimeError)
    assert_raised_at(failed.error, __file__, "in a batch")
    assert failed.saves["h"].shape == (1, 576)
    assert failed.tokens == alone(reference, model, PROMPT, 4)
    assert first.tokens == alone(reference, model, PROMPTS[2], 12)
    assert last.tokens == alone(reference, model, PROMPTS[3], 12)
    assert traced.error is None
    expected = reference.run(prompt_ids(model, OTHER), 12, record=False)
    assert traced.tokens == expected.tokens
    assert all(same(a, step.logits) for a, step in zip(traced.saves["norms"], expected.steps, strict=True))


@pytest.mark.engine
def test_f4_a_trace_is_independent_of_what_runs_before_and_beside_it(smollm2: Any, reference: Reference) -> None:
    model, batch = smollm2, Batch(smollm2)
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        model.model.layers[5].mlp.output[:] = 100
    with batch.traced(PROMPT, max_tokens=3, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[5].mlp.output[:] = 100
    with batch.traced(PROMPT, max_tokens=3, **GREEDY) as tracer:
        logits = list().save()
        for _ in tracer.iter[:]:
            logits.append(model.logits)
    batch.plain(PROMPT, max_tokens=3, **GREEDY)
    edited, traced, plain = batch.run()
    expected = reference.run(prompt_ids(model), 3, record=False)
    assert traced.tokens == plain.tokens == expected.tokens
    assert edited.tokens != expected.tokens
    assert all(same(a, step.logits) for a, step in zip(traced.saves["logits"], expected.steps, strict=True))


@pytest.mark.engine
@pytest.mark.parametrize("how", ["generates", "raises", "stops"])
def test_f4_a_nan_stays_with_its_own_request(smollm2: Any, reference: Reference, how: str) -> None:
    """Attention reads whole key-value blocks: a NaN left in a block would come through to whoever gets it next."""
    model, batch = smollm2, Batch(smollm2)
    batch.plain(OTHER, max_tokens=5, **GREEDY)
    with batch.traced(PROMPT, max_tokens=3, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            model.model.layers[3].mlp.output[-1] = float("nan")
            isnan = model.logits.isnan().all().item().save()
            if step == 1 and how == "raises":
                raise ValueError
            if step == 1 and how == "stops":
                tracer.stop()
    plain, broken = batch.run()
    assert len(broken.tokens) == (3 if how == "generates" else 2)
    assert broken.saves["isnan"] is True
    assert plain.tokens == alone(reference, model, OTHER, 5)
    for prompt in PROMPTS:
        batch.plain(prompt, max_tokens=5, **GREEDY)
    for prompt, member in zip(PROMPTS, batch.run(), strict=True):
        assert member.tokens == alone(reference, model, prompt, 5)
    assert_serves(model)


def test_f7_an_empty_block_is_a_plain_generation(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        pass
    assert tokens(tracer) == alone(reference, model, PROMPT, 4)
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        ...
    assert tokens(tracer) == alone(reference, model, PROMPT, 4)


def test_f8_a_location_that_has_passed_is_an_error_at_its_line(model: Any) -> None:
    with pytest.raises(PortPassedError) as caught:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[9].mlp.output
            early = model.model.layers[1].mlp.output.save()  # <early>
    message = str(caught.value)
    assert "model.layers.1.mlp.output has passed" in message
    assert "model.layers.9.mlp.output (place" in message
    assert_raised_at(caught.value, __file__, "early")
    assert_serves(model)


@pytest.mark.engine
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]], ids=str)
def test_f10_every_request_of_a_batch_equals_the_reference(
    smollm2: Any, reference: Reference, order: list[int]
) -> None:
    """Traced and plain in turns, of different lengths, so that they leave the batch one by one."""
    model, batch = smollm2, Batch(smollm2)
    for place, number in enumerate(order):
        count = 3 + 2 * number
        if place % 2:
            batch.plain(PROMPTS[number], max_tokens=count, **GREEDY)
            continue
        with batch.traced(PROMPTS[number], max_tokens=count, **GREEDY) as tracer:
            read = list().save()
            for _ in tracer.iter[:]:
                read.append((rows(model.model.layers[4].mlp.output), stream(model.model.layers[21]), model.logits))
    for member, number in zip(batch.run(), order, strict=True):
        expected = reference.run(prompt_ids(model, PROMPTS[number]), 3 + 2 * number)
        assert member.tokens == expected.tokens
        for (mlp, after, logits), step in zip(member.saves.get("read", ()), expected.steps, strict=False):
            assert same(mlp, step.output("model.layers.4.mlp"))
            assert same(after, step.output("model.layers.21"))
            assert same(logits, step.logits)


@pytest.mark.engine
def test_f10_the_hundredth_call_equals_the_first(smollm2: Any) -> None:
    model = smollm2
    calls = []
    for _ in range(100):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            h = stream(model.model.layers[15]).save()
        calls.append(h)
    assert all(torch.equal(h, calls[0]) for h in calls)


def test_f11_a_steering_edit_runs_once_per_generated_token(model: Any, reference: Reference) -> None:
    vector = torch.full((576,), 0.2)
    with model.trace(PROMPT, max_tokens=6, **GREEDY) as tracer:
        counter = 0
        for _ in tracer.iter[:]:
            model.model.layers[8].mlp.output[..., -1, :] += vector
            counter += 1
        counter.save()

    def steer(out: torch.Tensor) -> None:
        out[-1] += 0.2

    edits = [Edit("model.layers.8.mlp", "output", None, steer)]
    assert counter == len(tokens(tracer)) == 6
    assert tokens(tracer) == reference.run(prompt_ids(model), 6, edits, record=False).tokens


@pytest.mark.engine
@pytest.mark.parametrize("what", ["dtype", "rows"])
def test_f16_a_wrong_replacement_is_an_error_of_its_own_request(smollm2: Any, reference: Reference, what: str) -> None:
    model, batch = smollm2, Batch(smollm2)
    batch.plain(OTHER, max_tokens=5, **GREEDY)
    with batch.traced(PROMPT, max_tokens=5, **GREEDY):
        out = model.model.layers[6].mlp.output
        model.model.layers[6].mlp.output = out.half() if what == "dtype" else out[:4]  # <replacement>
    plain, failed = batch.run()
    assert isinstance(failed.error, WriteError)
    assert_raised_at(failed.error, __file__, "replacement")
    assert plain.tokens == alone(reference, model, OTHER, 5)
    assert_serves(model)


def test_f20_speculative_decoding_is_refused_with_the_reason() -> None:
    from invivo import VLLM
    from smollm2 import smollm2_path

    config = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(UnsupportedError, match=r"`speculative_config` cannot be used with traces: .*not its own steps"):
        VLLM(str(smollm2_path()), speculative_config=config)


@pytest.mark.engine
@pytest.mark.parametrize("how", ["exception", "stop"])
def test_f23_the_request_ends_at_its_step_under_ignore_eos(smollm2: Any, how: str) -> None:
    model, batch = smollm2, Batch(smollm2)
    with batch.traced(PROMPT, max_tokens=200, min_tokens=100, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            model.logits
            if step == 4:
                if how == "stop":
                    tracer.stop()
                raise ValueError
    (member,) = batch.run()
    assert len(member.tokens) == 5
    assert isinstance(member.error, ValueError) == (how == "exception")


@pytest.mark.parametrize("what", ["list", "attribute", "tensor"])
def test_f24_changes_of_outer_objects_that_are_not_saved_are_warned_about(model: Any, what: str) -> None:
    class Counter:
        count = 0

    things: Any = {"list": [], "attribute": Counter(), "tensor": torch.zeros(2)}[what]
    with pytest.warns(InvivoWarning) as caught:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            if what == "list":
                things.append(1)
            elif what == "attribute":
                things.count = 3
            else:
                things += 1
    (message,) = [str(entry.message) for entry in caught]
    assert message.startswith("`things` was changed in the block, but the change stays there")
    advice = (
        "Save the new value under a name of its own" if what == "attribute" else "Write `things.save()` in the block"
    )
    assert advice in message


def test_f24_no_warning_where_nothing_is_lost(model: Any) -> None:
    collected: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            collected.save()
            collected.append(model.logits.shape[-1])
    assert collected == [49152]


def test_f25_a_saved_value_that_no_name_holds_is_warned_about(model: Any) -> None:
    with pytest.warns(InvivoWarning, match="the value saved here is lost: at the end of the block no variable held it"):
        with model.trace(PROMPT, max_tokens=1, temperature=0) as tracer:
            (model.logits * 2).save()
    assert tracer.saves == {}


@pytest.mark.engine
def test_f29_the_callers_sampling_parameters_can_be_used_twice(smollm2: Any) -> None:
    from vllm import SamplingParams

    model, params = smollm2, SamplingParams(max_tokens=2, temperature=0)
    before = repr(params)
    results = []
    for _ in range(2):
        with model.trace(PROMPT, sampling_params=params):
            model.samples = 1234
            chosen = model.samples.save()
        results.append(chosen.tolist())
    assert results == [[1234], [1234]]
    assert repr(params) == before


def test_f31_layer_99_and_a_mistyped_key_are_errors_and_minus_one_is_the_last(model: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"numbered 0 to 29 \(or -30 to -1\)"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[99].output
    with pytest.raises(UnknownNameError, match="Did you mean `mlp`"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[0].mpl.output
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        address = model.model.layers[-1].address.save()
    assert address == "model.layers.29"


@pytest.mark.engine
def test_f33_other_traffic_is_normal_traffic(smollm2: Any, reference: Reference) -> None:
    model, batch = smollm2, Batch(smollm2)
    for prompt in PROMPTS[1:]:
        batch.plain(prompt, max_tokens=6, **GREEDY)
    with batch.traced(PROMPT, max_tokens=3, **GREEDY):
        logits = model.logits.save()
    *plain, traced = batch.run()
    for prompt, member in zip(PROMPTS[1:], plain, strict=True):
        assert member.tokens == alone(reference, model, prompt, 6)
    assert same(traced.saves["logits"], reference.run(prompt_ids(model), 1, record=False).steps[0].logits)
    from vllm import SamplingParams

    (output,) = model.engine.generate([OTHER], SamplingParams(max_tokens=4, **GREEDY), use_tqdm=False)
    assert list(output.outputs[0].token_ids) == alone(reference, model, OTHER, 4)


def test_f34_a_stop_decided_by_a_probe_at_the_third_token(model: Any) -> None:
    weights = torch.ones(576)
    with model.trace(PROMPT, max_tokens=50, **GREEDY) as tracer:
        scores = list().save()
        for step in tracer.iter[:]:
            scores.append(float(rows(model.model.layers[20].mlp.output)[-1] @ weights))
            if len(scores) == 3:
                tracer.stop()
    assert len(tokens(tracer)) == len(scores) == 3
