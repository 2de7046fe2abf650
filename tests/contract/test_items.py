"""``layer.output[0]``: where a block looks at one tensor of several, only that one is copied; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.contract import OTHER, PROMPT, prompt_ids, rows, same, tokens
from support.reference import Edit, Reference

pytestmark = pytest.mark.engine


def test_items_are_those_of_the_whole(smollm2: Any, reference: Reference) -> None:
    model = smollm2
    with model.trace(max_tokens=1, temperature=0) as tracer:
        with tracer.invoke(PROMPT):
            layer = model.model.layers[5]
            hidden = layer.output[0].save()
            residual = layer.output[1].save()
            whole = layer.output
            is_same = [whole[0] is hidden, whole[1] is residual, layer.output[0] is hidden, len(whole)].save()
        with tracer.invoke(OTHER):
            other_whole = model.model.layers[5].output.save()
        with tracer.invoke(OTHER):
            other_residual = model.model.layers[5].output[1].save()
    assert is_same == [True, True, True, 2]
    assert same(hidden + residual, reference.run(prompt_ids(model), 1).steps[0].output("model.layers.5"))
    expected = reference.run(prompt_ids(model, OTHER), 1).steps[0].output("model.layers.5")
    assert same(other_whole[0] + other_whole[1], expected)
    assert same(other_residual, other_whole[1])


def test_an_edit_of_one_item_is_what_the_model_goes_on_with(smollm2: Any, reference: Reference) -> None:
    model, vector = smollm2, torch.linspace(-1, 1, 576)

    def steer(hidden: torch.Tensor) -> None:
        hidden[-1] += vector

    with model.trace(max_tokens=1, temperature=0) as tracer:
        with tracer.invoke(PROMPT):
            model.model.layers[8].output[0][-1] += vector
            steered = model.logits.save()
        with tracer.invoke(PROMPT):
            model.model.layers[8].output[1][-1] += vector
            in_residual = model.logits.save()
        with tracer.invoke(PROMPT):
            looked = model.model.layers[8].output[1].save()
            untouched = model.logits.save()
    edit = Edit("model.layers.8", "output", 0, steer)
    expected = reference.run(prompt_ids(model), 1, [edit]).steps[0].logits
    assert same(steered, expected)
    assert same(in_residual, expected)
    plain = reference.run(prompt_ids(model), 1).steps[0]
    assert same(untouched, plain.logits) and not same(untouched, steered)
    assert len(looked) == len(prompt_ids(model))


def test_items_in_each_step_are_those_of_the_step(smollm2: Any, reference: Reference) -> None:
    """Such blocks have their turns later (`LaggingHub`)."""
    model = smollm2
    with model.trace(max_tokens=24, temperature=0, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT) as first:
            hidden = list().save()
            for _ in tracer.iter[:]:
                hidden.append(model.model.layers[3].output[0])
        with tracer.invoke(PROMPT):
            streams = list().save()
            for _ in tracer.iter[:]:
                streams.append(model.model.layers[3].output[0] + model.model.layers[3].output[1])
        with tracer.invoke(PROMPT):
            firsts = list().save()
            for _ in tracer.iter[:]:
                firsts.append((model.model.layers[3].mlp.output[0], model.model.layers[3].output))
    steps = reference.run(prompt_ids(model), 24).steps
    assert tokens(first) == [step.token for step in steps]
    for number, (one, both, (row, whole)) in enumerate(zip(hidden, streams, firsts, strict=True)):
        assert same(both, steps[number].output("model.layers.3"))
        assert same(one, whole[0])
        assert same(row, rows(steps[number].output("model.layers.3.mlp"))[0])


def test_items_that_are_not_there(smollm2: Any) -> None:
    model = smollm2
    with pytest.raises(IndexError, match="tuple index out of range"), model.trace(PROMPT, max_tokens=1):
        model.model.layers[3].output[2]
    with model.trace(PROMPT, max_tokens=1):
        try:
            model.model.layers[3].output[2]
        except IndexError:
            caught = len(model.model.layers[3].output).save()
    assert caught == 2


def test_functions_that_are_made_around_the_invokes(smollm2: Any) -> None:
    """They are rewritten with the body that they are in, and travel."""
    model = smollm2
    with model.trace(max_tokens=1) as tracer:

        def read(layer: Any) -> Any:
            return layer.output[0]

        with tracer.invoke(PROMPT):
            found = read(model.model.layers[3]).save()
        with tracer.invoke(PROMPT):
            whole = model.model.layers[3].output.save()
    assert torch.equal(found, whole[0])
