"""Rule 5: edits are what the model goes on with, until the block asks for its next port."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo import WriteError
from support.contract import PROMPT, assert_serves, error_of, first, prompt_ids, rows, same, tokens
from support.reference import Change, Edit, Reference

LAYER = "model.layers.12.mlp"
VECTOR = torch.cos(torch.arange(576, dtype=torch.float32) ** 2) * 3


def zero(out: torch.Tensor) -> None:
    out.zero_()


def zero_last(out: torch.Tensor) -> None:
    out[..., -1, :] = 0


def add_last(out: torch.Tensor) -> None:
    out[..., -1, :] += VECTOR


def add_everywhere(out: torch.Tensor) -> None:
    out += VECTOR


def double_second(out: torch.Tensor) -> None:
    if out.shape[-2] > 1:
        out[..., 1, :] *= 2


CHANGES = [zero, zero_last, add_last, add_everywhere, double_second]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_in_place_edits_equal_the_reference(model: Any, reference: Reference, change: Change) -> None:
    with model.trace(PROMPT, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        logits = list().save()
        for _ in tracer.iter[:]:
            change(model.model.layers[12].mlp.output)
            logits.append(model.logits)
    expected = reference.run(prompt_ids(model), 4, [Edit(LAYER, "output", None, change)], record=False)
    assert tokens(tracer) == expected.tokens
    assert all(same(a, step.logits) for a, step in zip(logits, expected.steps, strict=True))
    plain = reference.run(prompt_ids(model), 1, record=False)
    assert error_of(logits[0], plain.steps[0].logits) > 1e-2, "the edit shows nothing"


def test_edits_written_in_the_block_itself(model: Any, reference: Reference) -> None:
    v = VECTOR
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        model.model.layers[3].mlp.output[..., -1, :] = 0
        model.model.layers[12].mlp.output[..., 0, :] += v
        model.model.layers[20].mlp.output = model.model.layers[20].mlp.output * 0.5
        logits = model.logits.save()

    def add_first(out: torch.Tensor) -> None:
        out[..., 0, :] += VECTOR

    edits = [
        Edit("model.layers.3.mlp", "output", 0, zero_last),
        Edit("model.layers.12.mlp", "output", 0, add_first),
        Edit("model.layers.20.mlp", "output", 0, lambda out: out * 0.5),
    ]
    assert same(logits, reference.run(prompt_ids(model), 1, edits, record=False).steps[0].logits)


def test_an_edit_is_seen_where_it_arrives(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        first(model.model.layers[8].mlp.down_proj.output)[:] = 7
        arrived = rows(model.model.layers[8].mlp.output).save()
    assert torch.equal(arrived, torch.full_like(arrived, 7))


def test_assignment_of_an_output_and_of_an_input(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        mlp = model.model.layers[12].mlp
        mlp.input = torch.zeros_like(mlp.input)
        inside = rows(mlp.output).save()
        other = model.model.layers[15].mlp
        other.output = -other.output
        logits = model.logits.save()
    assert torch.equal(inside, torch.zeros_like(inside))
    edits = [Edit(LAYER, "input", 0, zero), Edit("model.layers.15.mlp", "output", 0, torch.neg)]
    assert same(logits, reference.run(prompt_ids(model), 1, edits, record=False).steps[0].logits)


def test_assignment_of_inputs(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        args, kwargs = model.model.layers[12].mlp.inputs
        model.model.layers[12].mlp.inputs = ((args[0] * 2, *args[1:]), kwargs)
        logits = model.logits.save()
    edits = [Edit(LAYER, "input", 0, lambda rows: rows * 2)]
    assert same(logits, reference.run(prompt_ids(model), 1, edits, record=False).steps[0].logits)


def test_an_edit_of_input_in_place(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        model.model.layers[12].mlp.input[..., -1, :] = 0
        logits = model.logits.save()
    edits = [Edit(LAYER, "input", 0, zero_last)]
    assert same(logits, reference.run(prompt_ids(model), 1, edits, record=False).steps[0].logits)


def test_an_edit_after_the_next_port_changes_nothing(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        out = model.model.layers[12].mlp.output
        model.model.layers[13].mlp.output
        out[:] = 0
        logits = model.logits.save()
        mine = float(out.abs().sum()).save()
    assert mine == 0
    assert same(logits, reference.run(prompt_ids(model), 1, record=False).steps[0].logits)


def test_an_edit_of_a_copy_changes_nothing(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        out = model.model.layers[12].mlp.output.clone()
        out[:] = 0
        logits = model.logits.save()
    assert same(logits, reference.run(prompt_ids(model), 1, record=False).steps[0].logits)


def test_an_edit_through_a_view_counts(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        view = model.model.layers[12].mlp.output[..., -1, :]
        view.zero_()
        logits = model.logits.save()
    edits = [Edit(LAYER, "output", 0, zero_last)]
    assert same(logits, reference.run(prompt_ids(model), 1, edits, record=False).steps[0].logits)


def test_an_edit_does_not_reach_the_next_trace(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        model.model.layers[0].output
        model.model.layers[1].mlp.output[:] = 1e3
    assert_serves(model)


def test_writing_logits_chooses_the_token(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
        model.logits[:] = -1e9
        model.logits[0, 1234] = 0
        sampled = model.samples.save()
    assert sampled.tolist() == [1234]
    assert tokens(tracer)[0] == 1234


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_writing_samples_changes_what_is_generated(model: Any, reference: Reference, as_tensor: bool) -> None:
    forced = 4321
    with model.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            if step == 0:
                model.samples = torch.tensor([forced]) if as_tensor else forced
            else:
                after = model.logits.save()
    expected = reference.logits([*prompt_ids(model), forced])[-1:]
    assert tokens(tracer) == [forced, int(expected.argmax())]
    assert same(after, expected)


def test_writing_samples_in_place(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            model.samples[0] = 100 + step
    assert tokens(tracer) == [100, 101, 102]


def test_a_steering_vector_computed_from_the_requests_own_values(model: Any, reference: Reference) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        logits = list().save()
        for _ in tracer.iter[:]:
            out = model.model.layers[12].mlp.output
            out -= out.mean(-1, keepdim=True)
            logits.append(model.logits)
    edits = [Edit(LAYER, "output", None, lambda rows: rows - rows.mean(-1, keepdim=True))]
    expected = reference.run(prompt_ids(model), 3, edits, record=False)
    assert tokens(tracer) == expected.tokens
    assert all(same(a, step.logits) for a, step in zip(logits, expected.steps, strict=True))


@pytest.mark.engine
def test_parts_of_a_tuple_are_edited_by_themselves(smollm2: Any, reference: Reference) -> None:
    model = smollm2
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        hidden, residual = model.model.layers[5].output
        model.model.layers[5].output = (hidden * 0, residual + hidden)
        same_stream = model.logits.save()
    assert same(same_stream, reference.run(prompt_ids(model), 1, record=False).steps[0].logits)


def test_ids_out_of_range_are_refused(model: Any) -> None:
    with pytest.raises(WriteError, match="token ids from 0 to 49151"):
        with model.trace(PROMPT, max_tokens=3, temperature=0):
            model.samples = 49152
    assert_serves(model)
