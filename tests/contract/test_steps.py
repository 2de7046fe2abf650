"""Rule 7: a loop over steps moves a block through the generation, and each step has its own values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from invivo import InvivoWarning, PortPassedError, StepError
from support.contract import PROMPT, assert_raised_at, assert_serves, prompt_ids, rows, same, stream, tokens
from support.reference import Reference

LAYER = "model.layers.10"
COUNT = 5


def check_steps(read: list[Any], steps: list[int], reference: Reference, ids: list[int]) -> None:
    """Each value of `read` is that of its step in the reference."""
    expected = reference.run(ids, max(steps) + 1).steps
    assert len(read) == len(steps)
    for found, step in zip(read, steps, strict=True):
        assert same(found, expected[step].output(LAYER)), f"step {step}"


KEYS = {
    "all": (slice(None), [0, 1, 2, 3, 4]),
    "one": (2, [2]),
    "slice": (slice(1, 4), [1, 2, 3]),
    "open": (slice(2, None), [2, 3, 4]),
    "until": (slice(3), [0, 1, 2]),
    "stride": (slice(0, None, 2), [0, 2, 4]),
    "list": ([0, 3], [0, 3]),
    "tuple": ((1, 4), [1, 4]),
    "range": (range(1, 5, 2), [1, 3]),
    "none": (slice(2, 2), []),
}


@pytest.mark.parametrize("name", KEYS)
def test_iter_runs_the_steps_of_its_key(model: Any, reference: Reference, name: str) -> None:
    key, expected = KEYS[name]
    with model.trace(PROMPT, max_tokens=COUNT, temperature=0, ignore_eos=True) as tracer:
        ran = list().save()
        read = list().save()
        for step in tracer.iter[key]:
            ran.append(step)
            read.append(stream(model.model.layers[10]))
    assert ran == expected
    if expected:
        check_steps(read, expected, reference, prompt_ids(model))
    assert len(tokens(tracer)) == COUNT


def test_iter_as_written_in_the_readme(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=COUNT, temperature=0, ignore_eos=True) as tracer:
        read = list().save()
        for _ in tracer.iter[2]:
            read.append(stream(model.model.layers[10]))
        for _ in tracer.iter[3:]:
            read.append(stream(model.model.layers[10]))
    check_steps(read, [2, 3, 4], reference, prompt_ids(model))


def test_iter_without_a_key_and_all(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        plain = list().save()
        for step in tracer.iter:
            plain.append(step)
    with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        read = list().save()
        with tracer.all():
            read.append(stream(model.model.layers[10]))
    assert plain == [0, 1, 2]
    check_steps(read, [0, 1, 2], reference, prompt_ids(model))
    with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        numbers = [10 * step for step in tracer.all()].save()
    assert numbers == [0, 10, 20]


def test_iter_as_a_with(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=COUNT, temperature=0, ignore_eos=True) as tracer:
        read = list().save()
        ran = list().save()
        with tracer.iter[1:3] as step:
            ran.append(step)
            read.append(stream(model.model.layers[10]))
    assert ran == [1, 2]
    check_steps(read, [1, 2], reference, prompt_ids(model))


def test_an_edit_counter_equals_the_number_of_generated_tokens(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=7, temperature=0) as tracer:
        edits = 0
        for _ in tracer.iter[:]:
            model.model.layers[3].mlp.output[:] *= 1.01
            edits += 1
        edits.save()
    assert edits == len(tokens(tracer)) == 7


def test_nested_loops(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=6, temperature=0, ignore_eos=True) as tracer:
        pairs = list().save()
        read = list().save()
        for outer in tracer.iter[0:6:3]:
            for inner in tracer.iter[outer : outer + 2]:
                pairs.append((outer, inner))
                read.append(stream(model.model.layers[10]))
    assert pairs == [(0, 0), (0, 1), (3, 3), (3, 4)]
    check_steps(read, [0, 1, 3, 4], reference, prompt_ids(model))


def test_layers_within_steps(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        grid = list().save()
        for _ in tracer.iter[:]:
            grid.append([rows(layer.mlp.output) for layer in model.model.layers[::10]])
    expected = reference.run(prompt_ids(model), 3).steps
    for found, step in zip(grid, expected, strict=True):
        for number, value in zip((0, 10, 20), found, strict=True):
            assert same(value, step.output(f"model.layers.{number}.mlp"))


def test_a_block_without_a_loop_lives_in_step_0(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0) as tracer:
        value = rows(model.model.layers[0].mlp.output).save()
    assert value.shape[0] == len(prompt_ids(model))
    assert len(tokens(tracer)) == 3


def test_breaking_out_of_the_loop_leaves_the_request_running(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=5, temperature=0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            last = step
            if step == 2:
                break
        last.save()
    assert last == 2
    assert len(tokens(tracer)) == 5


def test_the_result_after_the_loop(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        generated = list().save()
        for _ in tracer.iter[:]:
            generated.append(int(model.samples[0]))
        result = tracer.result
        inside = list(result.outputs[0].token_ids if hasattr(result, "outputs") else result.token_ids).save()
    assert inside == generated == tokens(tracer)


def test_a_bounded_loop_that_the_request_cannot_fill_warns(model: Any) -> None:
    with pytest.warns(InvivoWarning) as caught:
        with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
            ran = list().save()
            for step in tracer.iter[:5]:
                ran.append(step)
    assert ran == [0, 1, 2]
    (message,) = [str(entry.message) for entry in caught]
    assert message == (
        "`tracer.iter[:5]` ran 3 of 5 steps: the request ended before step 3. Raise `max_tokens`, or use an open "
        "range such as `[3:]`."
    )
    assert caught[0].filename == __file__
    assert len(tokens(tracer)) == 3


@pytest.mark.parametrize("key", [4, [1, 9], slice(1, 9, 4)])
def test_every_kind_of_bounded_loop_warns(model: Any, key: Any) -> None:
    with pytest.warns(InvivoWarning, match=r"ran \d of \d steps: the request ended before step"):
        with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
            for _ in tracer.iter[key]:
                model.logits


def test_an_open_loop_ends_quietly(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
            after = "not reached"
            for _ in tracer.iter[1:]:
                model.logits
            after = "the end"
            after.save()
            for _ in tracer.iter[7:]:
                after = "wrong"
    assert after == "the end"


def test_a_step_that_has_passed(model: Any) -> None:
    with pytest.raises(StepError, match="step 1 has passed: the request is in step 2") as caught:
        with model.trace(PROMPT, max_tokens=5, temperature=0, ignore_eos=True) as tracer:
            for _ in tracer.iter[2]:
                pass
            for _ in tracer.iter[1]:  # <passed step>
                pass
    assert_raised_at(caught.value, __file__, "passed step")
    assert_serves(model)


@pytest.mark.parametrize("key", [-1, slice(-2, None), slice(None, None, -1), [2, 1], [1, 1], [0.5], "2"])
def test_keys_that_are_no_steps(model: Any, key: Any) -> None:
    with pytest.raises((StepError, TypeError)):
        with model.trace(PROMPT, max_tokens=3, temperature=0) as tracer:
            for _ in tracer.iter[key]:
                pass
    assert_serves(model)


def test_a_port_after_the_end_of_the_request(model: Any) -> None:
    with pytest.raises(StepError, match="was asked for after the request had ended") as caught:
        with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                model.logits
            model.logits  # <after the end>
    assert_raised_at(caught.value, __file__, "after the end")
    assert_serves(model)


def test_a_port_after_its_own_step(model: Any) -> None:
    """The loop has moved the block to the next step; what was there is there again, with that step's values."""
    with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            model.logits
            late = ""
            try:
                model.model.norm.output
            except PortPassedError as error:
                late = str(error)
        late.save()
    assert "has passed" in late
