"""``n``: several samples of one prompt, each with a block of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo import UnsupportedError, save
from support.contract import PROMPT

pytestmark = pytest.mark.engine

SAMPLING: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "ignore_eos": True}


def test_each_sample_has_its_own_block_and_values(smollm2: Any) -> None:
    model = smollm2
    with model.trace(PROMPT, n=3, seed=5, **SAMPLING) as tracer:
        ids = save([])
        for _ in tracer.iter[:]:
            ids.append(int(model.samples[0]))
    assert len(ids) == 3 and all(len(one) == 4 for one in ids)
    assert [list(completion.token_ids) for completion in tracer.result.outputs] == ids
    assert [completion.index for completion in tracer.result.outputs] == [0, 1, 2]


def test_the_samples_are_those_that_vllm_draws(smollm2: Any) -> None:
    (plain,) = smollm2.generate(PROMPT, n=3, seed=5, use_tqdm=False, **SAMPLING)
    with smollm2.trace(PROMPT, n=3, seed=5, **SAMPLING) as tracer:
        pass
    expected = {tuple(completion.token_ids) for completion in plain.outputs}
    assert {tuple(completion.token_ids) for completion in tracer.result.outputs} == expected
    assert len(expected) == 3


def test_an_edit_of_every_sample(smollm2: Any) -> None:
    model = smollm2
    with model.trace(PROMPT, n=2, seed=1, **SAMPLING) as tracer:
        for step in tracer.iter[:]:
            model.samples = 100 + step
    assert [list(completion.token_ids) for completion in tracer.result.outputs] == [[100, 101, 102, 103]] * 2


def test_random_numbers_of_the_blocks_differ_and_come_again(smollm2: Any) -> None:
    drawn = []
    for _ in range(2):
        with smollm2.trace(PROMPT, n=2, seed=3, **SAMPLING):
            noise = torch.randn(4).save()  # type: ignore[attr-defined]
        drawn.append(noise)
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_an_error_in_one_sample(smollm2: Any) -> None:
    with pytest.raises(ZeroDivisionError), smollm2.trace(PROMPT, n=2, seed=3, **SAMPLING):
        noise = torch.randn(1).save()  # type: ignore[attr-defined]
        1 / 0
    with smollm2.trace(PROMPT, max_tokens=1, temperature=0):
        fine = smollm2.logits.save()
    assert fine.shape[0] == 1


def test_invokes_have_one_sample(smollm2: Any) -> None:
    with pytest.raises(UnsupportedError, match="one request each"), smollm2.trace(**SAMPLING) as tracer:
        with tracer.invoke(PROMPT, n=2):
            pass
