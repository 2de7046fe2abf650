"""Rule 10: random numbers in a block depend on the seed alone, and leave the engine's own alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from support.contract import PROMPT, tokens


def draw(model: Any, **sampling: Any) -> tuple[Any, ...]:
    with model.trace(PROMPT, max_tokens=2, temperature=0, **sampling) as tracer:
        one = torch.rand(3).save()
        model.model.layers[3].output
        two = torch.randn(2).save()
        python = random.random()
        python.save()
        array = float(np.random.rand()).save()
        for _ in tracer.iter[1]:
            three = torch.randint(1000, (2,)).save()
    return one.tolist(), two.tolist(), python, array, three.tolist()


def test_the_same_seed_gives_the_same_numbers(model: Any) -> None:
    first = draw(model, seed=7)
    torch.rand(5), random.random(), np.random.rand()
    assert draw(model, seed=7) == first


def test_another_seed_gives_others(model: Any) -> None:
    first, second = draw(model, seed=7), draw(model, seed=8)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_without_a_seed_runs_repeat(model: Any) -> None:
    assert draw(model) == draw(model)


def test_both_backends_draw_the_same(local_smollm2: Any) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    assert draw(local_smollm2, seed=0)[0] == expected


def test_the_callers_random_state_is_left_alone(model: Any) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    draw(model, seed=1)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_what_a_block_draws_does_not_change_what_is_sampled(model: Any) -> None:
    def sample(draws: int) -> list[int]:
        with model.trace(PROMPT, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                model.model.layers[3].output
                torch.rand(draws)
        return tokens(tracer)

    plain = sample(0)
    assert sample(1000) == plain
    assert sample(0) == plain


@pytest.mark.parametrize("setting", ["grad", "dtype"])
def test_torch_settings_of_a_block_are_its_own(model: Any, setting: str) -> None:
    with model.trace(PROMPT, max_tokens=2, temperature=0) as tracer:
        if setting == "grad":
            torch.set_grad_enabled(True)
        else:
            torch.set_default_dtype(torch.float64)
        logits = list().save()
        kept = list().save()
        for _ in tracer.iter[:]:
            model.model.layers[3].output
            kept.append(torch.is_grad_enabled() if setting == "grad" else torch.zeros(1).dtype)
            logits.append(model.logits)
    assert kept == [True if setting == "grad" else torch.float64] * 2
    assert logits[1].dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        after = torch.zeros(1).dtype.save()
    assert after == torch.float32


def test_gradients_within_a_block(model: Any) -> None:
    """What was read can be differentiated, if the block leaves inference mode for it."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        h = model.model.layers[3].mlp.output
        with torch.inference_mode(False), torch.enable_grad():
            leaf = h.clone().requires_grad_()
            (leaf**2).sum().backward()
            matches = torch.allclose(leaf.grad, 2 * h).save()
    assert matches
