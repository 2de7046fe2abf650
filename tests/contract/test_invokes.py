"""Several prompts in one trace: invokes that share objects, hand on values, and fail alone."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from invivo import (
    CaptureError,
    InvivoWarning,
    InvokeError,
    MisuseError,
    OutsideBlockError,
    SamplingError,
    TransferError,
)
from support.contract import (
    OTHER,
    PROMPT,
    assert_raised_at,
    assert_serves,
    first,
    prompt_ids,
    result_tokens,
    rows,
    same,
    stream,
)
from support.reference import Reference

PROMPTS = [
    PROMPT,
    OTHER,
    "The Colosseum is in the city of",
    "Water boils at",
    "The first president was",
    "One, two, three,",
    "The sky is",
    "In the beginning",
]
LAYER = "model.layers.10"


@pytest.fixture(autouse=True)
def nothing_left(model: Any) -> Any:
    """After each test the model holds nothing of it."""
    yield
    model.check_integrity()


def test_each_invoke_is_its_own_request(model: Any, reference: Reference) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        with tracer.invoke(PROMPT) as one:
            paris = stream(model.model.layers[10]).save()
        with tracer.invoke(OTHER) as two:
            tokyo = stream(model.model.layers[10]).save()
    assert same(paris, reference.run(prompt_ids(model), 1).steps[0].output(LAYER))
    assert same(tokyo, reference.run(prompt_ids(model, OTHER), 1).steps[0].output(LAYER))
    assert torch.equal(one.saves["paris"], paris) and list(two.saves) == ["tokyo"]
    assert set(tracer.saves) == {"paris", "tokyo"}
    tokenizer = model.tokenizer if hasattr(type(model), "tokenizer") else model._tokenizer
    assert [tokenizer.decode(result_tokens(result)) for result in tracer.results] == [" Paris", " Tokyo"]
    assert tracer.result == tracer.results == [one.result, two.result]


def test_patching_between_invokes_equals_two_traces(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        donor = first(model.model.layers[12].mlp.output)[..., -1, :].clone().save()
    with model.trace(OTHER, max_tokens=1, temperature=0):
        first(model.model.layers[12].mlp.output)[..., -1, :] = donor
        expected = model.logits.save()
    with model.trace(max_tokens=1, temperature=0) as tracer:
        with tracer.invoke(PROMPT):
            h = first(model.model.layers[12].mlp.output)[..., -1, :].clone()
        with tracer.invoke(OTHER):
            first(model.model.layers[12].mlp.output)[..., -1, :] = h
            logits = model.logits.save()
    assert same(logits, expected)
    assert "h" not in locals()


def test_a_shared_list_is_complete_and_in_order(model: Any, reference: Reference) -> None:
    with model.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        seen = list().save()
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                for step in tracer.iter[:]:
                    seen.append((step, number, rows(model.model.layers[10].mlp.output)[-1]))
    assert len(seen) == 3 * len(PROMPTS)
    for step in range(3):
        assert [number for at, number, _ in seen if at == step] == list(range(len(PROMPTS)))
    for step, number, value in seen:
        if step == 0:
            expected = reference.run(prompt_ids(model, PROMPTS[number]), 1).steps[0].output(f"{LAYER}.mlp")
            assert same(value, expected[-1])


def test_shared_containers_of_every_kind(model: Any) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        norms = dict().save()
        counts = Counter().save()
        kinds = {1}.save()
        nested = {"inner": []}.save()
        inner = nested["inner"]
        for prompt in PROMPTS[:3]:
            with tracer.invoke(prompt):
                norms[prompt] = rows(model.model.layers[3].mlp.output).norm().item()
                counts[len(norms)] += 2
                kinds.add(len(prompt))
                inner.append(prompt)
    assert list(norms) == PROMPTS[:3] and all(value > 0 for value in norms.values())
    assert counts == Counter({1: 2, 2: 2, 3: 2})
    assert kinds == {1, *(len(prompt) for prompt in PROMPTS[:3])}
    assert nested == {"inner": PROMPTS[:3]}


def test_one_object_need_not_be_saved(model: Any) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        box: dict[str, Any] = {}
        with tracer.invoke(PROMPT):
            box["count"] = rows(model.model.layers[0].output).shape[0]
            result = tracer.result
        with tracer.invoke(OTHER):
            seen = sorted(box).save()
    assert set(seen) <= {"count"}
    assert "box" not in locals() and "result" not in locals()


def test_sampling_of_an_invoke_goes_first(model: Any) -> None:
    with model.trace(max_tokens=5, temperature=0, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT):
            model.logits
        with tracer.invoke(PROMPT, max_tokens=2):
            model.logits
    assert [len(result_tokens(result)) for result in tracer.results] == [5, 2]
    with pytest.raises(SamplingError, match="max_token"):
        with model.trace(temperature=0) as tracer:
            with tracer.invoke(PROMPT, max_token=2):
                model.logits


def test_the_same_name_saved_twice_warns(model: Any) -> None:
    with pytest.warns(InvivoWarning) as caught:
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT) as clean:
                n = rows(model.model.layers[0].output).shape[0].save()
            with tracer.invoke(OTHER):
                n = rows(model.model.layers[0].output).shape[0].save()
    (message,) = [str(entry.message) for entry in caught]
    assert message.startswith("`n` was saved by invokes 0 and 1: the name holds what the last one saved.")
    assert n == len(prompt_ids(model, OTHER)) and clean.saves["n"] == len(prompt_ids(model))


def test_a_value_that_goes_from_invoke_to_invoke(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(max_tokens=1, temperature=0) as tracer:
            total = 100
            for prompt in PROMPTS[:3]:
                with tracer.invoke(prompt):
                    total += rows(model.model.layers[0].output).shape[0]
                    total.save()
    assert total == 100 + sum(len(prompt_ids(model, prompt)) for prompt in PROMPTS[:3])


def test_a_name_that_the_body_assigns_again_is_not_handed_on(model: Any) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        totals = list().save()
        for prompt in PROMPTS[:3]:
            total = 0
            with tracer.invoke(prompt):
                total += rows(model.model.layers[0].output).shape[0]
                totals.append(total)
    assert sorted(totals) == sorted(len(prompt_ids(model, prompt)) for prompt in PROMPTS[:3])


def test_a_handed_on_value_goes_before_the_callers(model: Any) -> None:
    h = "the caller's"
    with model.trace(max_tokens=1, temperature=0) as tracer:
        with tracer.invoke(PROMPT):
            before = h.save()
            h = 1
        with tracer.invoke(OTHER):
            after = h.save()
    assert (before, after, h) == ("the caller's", 1, "the caller's")


def add(tracer: Any, model: Any, seen: list[Any], prompt: str) -> None:
    with tracer.invoke(prompt) as inner:
        count = rows(model.model.layers[0].output).shape[0].save()
        seen.append((inner.result is not None, count))


def test_invokes_in_a_function_and_behind_conditions(model: Any) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        seen = list().save()
        for number, prompt in enumerate(PROMPTS[:4]):
            if number % 2:
                add(tracer, model, seen, prompt)
    assert sorted(seen) == sorted((True, len(prompt_ids(model, prompt))) for prompt in PROMPTS[1:4:2])
    assert len(tracer.invokes) == 2 and tracer.invokes[0].saves["count"] == len(prompt_ids(model, OTHER))
    assert "count" not in locals()


def test_both_tracers_mean_the_running_block(model: Any) -> None:
    with model.trace(max_tokens=6, temperature=0, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT) as mine:
            steps = list().save()
            with tracer.iter[:3] as step:
                steps.append(step)
            for step in mine.iter[4]:
                steps.append(step)
            text = list(result_tokens(tracer.result)).save()
        with tracer.invoke(OTHER) as other:
            for step in other.iter[:]:
                if step == 1:
                    tracer.stop()
    assert steps == [0, 1, 2, 4] and text == result_tokens(mine.result)
    assert len(result_tokens(other.result)) == 2


def test_an_error_in_one_invoke_leaves_the_others(model: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        with model.trace(max_tokens=2, temperature=0) as tracer:
            seen = list().save()
            with tracer.invoke(PROMPT) as good:
                a = model.logits.save()
                seen.append("a")
            with tracer.invoke(OTHER) as bad:
                b = rows(model.model.layers[1].mlp.output).save()
                b @ torch.ones(3)  # <wrong size>
            with tracer.invoke(PROMPTS[2]) as last:
                c = model.logits.save()
                seen.append("c")
    assert_raised_at(caught.value, __file__, "wrong size")
    assert "in invoke 1 of 0 to 2" in caught.value.__notes__
    saves: Any = caught.value.saves  # type: ignore[attr-defined]
    assert set(saves) == {"a", "b", "c", "seen"} and sorted(saves["seen"]) == ["a", "c"]
    assert set(good.saves) == {"a"} and set(bad.saves) == {"b"} and set(last.saves) == {"c"}
    assert set(tracer.saves) == set(saves)
    assert_serves(model)


def test_the_first_error_is_raised(model: Any) -> None:
    with pytest.raises(ValueError, match="one") as caught:
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT):
                model.logits
                raise ValueError("one")
            with tracer.invoke(PROMPT):
                raise TypeError("two")
    assert "in invoke 0 of 0 to 1; invokes 1 failed too" in caught.value.__notes__


def test_a_giver_that_fails_or_does_not_assign(model: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT):
                h = 1 // 0
            with tracer.invoke(PROMPT):
                h.save()
    with pytest.raises(InvokeError, match="invoke 1 reads `h`, which invoke 0 was to hand on, and that one ended"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT):
                if model.logits.sum() == 0.5:
                    h = 1
            with tracer.invoke(PROMPT):
                h.save()
    assert_serves(model)


def test_a_value_has_no_other_name_and_is_not_here(model: Any) -> None:
    with pytest.raises(OutsideBlockError, match="`h` is assigned in invoke 0") as caught:
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT):
                h = model.logits
            h.norm()  # <not here>
    assert_raised_at(caught.value, __file__, "not here")
    with pytest.raises(TransferError, match="it stands for `h` of invoke 0"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT):
                h = model.logits
            g = h
            with tracer.invoke(PROMPT):
                g.save()


def test_an_error_of_the_body_is_raised_as_it_is(model: Any) -> None:
    with pytest.raises(KeyError, match="missing") as caught:
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT):
                model.logits
            {}["missing"]  # <on the client>
    assert_raised_at(caught.value, __file__, "on the client")
    assert caught.value.__context__ is None


def test_uses_that_are_refused(model: Any) -> None:
    with pytest.raises(MisuseError, match="made no invoke"):
        with model.trace(max_tokens=1):
            pass
    with pytest.raises(OutsideBlockError, match=r"Use it inside `with tracer\.invoke\(prompt\):`"):
        with model.trace(max_tokens=1) as tracer:
            model.logits
    with pytest.raises(CaptureError, match="leave the prompt out"):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                pass
    with pytest.raises(CaptureError, match="an invoke inside of another one"):
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                with tracer.invoke(PROMPT):
                    pass
    with pytest.raises(MisuseError, match="is for a trace without a prompt"):
        with model.trace(PROMPT, max_tokens=1, temperature=0) as tracer:
            model.logits
        tracer.invoke(PROMPT)
    with pytest.raises(MisuseError, match="was called in a block"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            with tracer.invoke(PROMPT):
                tracer.invoke(OTHER)
    with pytest.raises(MisuseError, match="`settings` was changed in the body around the invokes"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            settings = {"layer": 0}
            for _ in range(2):
                with tracer.invoke(PROMPT):
                    model.model.layers[settings["layer"]].output
                settings["layer"] = 1


def test_the_callers_own_objects(model: Any) -> None:
    """Lists of the caller are copies, as in any block, unless the body saves them."""
    mine: list[int] = []
    saved: list[int] = [0]
    with pytest.warns(InvivoWarning, match="`mine` was changed in the block, but the change stays there"):
        with model.trace(max_tokens=1, temperature=0) as tracer:
            saved.save()  # type: ignore[attr-defined]
            mine.append(5)
            with tracer.invoke(PROMPT):
                mine.append(1)
                saved.append(1)
            with tracer.invoke(OTHER):
                saved.append(2)
    assert mine == [5] and sorted(saved) == [0, 1, 2]


def test_values_saved_around_the_invokes_stay_as_they_are(model: Any) -> None:
    with model.trace(max_tokens=1, temperature=0) as tracer:
        number = (3 + 4).save()
        handles = list().save()
        for prompt in PROMPTS[:2]:
            with tracer.invoke(prompt) as handle:
                count = rows(model.model.layers[0].output).shape[0]
                print(f"counted {count}")
            handles.append(handle)
    assert number == 7 and handles == tracer.invokes and handle is handles[1]


@pytest.mark.engine
def test_a_tensor_that_all_invokes_capture_travels_once(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from invivo.vllm_backend.engine import Engine

    called: list[tuple[object, ...]] = []
    call = Engine.call
    monkeypatch.setattr(Engine, "call", lambda self, *args: called.append(args) or call(self, *args))
    vectors = torch.arange(20 * 576.0).reshape(20, 576)
    with smollm2.trace(max_tokens=1, temperature=0) as tracer:
        sums = list().save()
        for index in range(4):
            with tracer.invoke(PROMPT):
                sums.append((index, vectors[index].sum().item()))
    assert sorted(sums) == [(index, vectors[index].sum().item()) for index in range(4)]
    assert [args[0] for args in called].count("invivo_bring") == 1
    smollm2.check_integrity()
