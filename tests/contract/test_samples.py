"""``n``: several samples of one prompt, each with a block of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invivo import MisuseError, save
from support.contract import OTHER, PROMPT
from support.streams import outputs_of, run

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


def test_samples_of_an_asynchronous_engine(async_smollm2: Any, smollm2: Any) -> None:
    """They are those of one that waits; each output says of which it is."""
    model = async_smollm2
    with smollm2.trace(PROMPT, n=3, seed=5, **SAMPLING) as waited:
        pass
    with model.trace(PROMPT, n=3, seed=5, **SAMPLING) as tracer:
        ids = save([])
        for _ in tracer.iter[:]:
            token = int(model.samples[0])
            token.save(stream=True)  # type: ignore[attr-defined]
            ids.append(token)
    outputs = run(outputs_of(tracer))
    expected = [list(completion.token_ids) for completion in waited.result.outputs]
    assert tracer.saves == {"ids": expected, "token": [one[-1] for one in expected]}
    assert [list(completion.token_ids) for completion in tracer.result.outputs] == expected
    for sample in range(3):
        own = [output for output in outputs if output.outputs[0].index == sample]
        assert [output.saves["token"] for output in own] == expected[sample]
        assert own[-1].finished and own[-1].saves["ids"] == expected[sample]
        assert all(output.invoke == 0 and len(output.outputs) == 1 for output in own)


def test_an_error_in_one_sample_of_an_asynchronous_engine(async_smollm2: Any) -> None:
    model = async_smollm2
    drawn = torch.randn(1, generator=torch.Generator().manual_seed(4)).item()  # what the second one draws
    with model.trace(PROMPT, n=2, seed=3, **SAMPLING) as tracer:
        early = [1].save()  # type: ignore[attr-defined]
        noise = torch.randn(1)
        if noise.item() == drawn:
            1 / 0
        late = [2].save()  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError) as caught:
        run(outputs_of(tracer))
    assert caught.value.saves == {"early": [[1], [1]], "late": [[2], None]}  # type: ignore[attr-defined]


def invoke_several(model: Any) -> Any:
    with model.trace(seed=5, **SAMPLING) as tracer:
        seen = save([])
        with tracer.invoke(OTHER) as one:
            shift = (99 + 1).save()  # type: ignore[attr-defined]
        with tracer.invoke(PROMPT, n=3) as three:
            shift.bit_length()
            tokens = save([])
            for step in tracer.iter[:]:
                tokens.append(int(model.samples[0]))
            seen.append(tokens[0])
        with tracer.invoke(OTHER, n=2, max_tokens=1):
            model.samples = shift
    return tracer


@pytest.mark.parametrize("engine", ["smollm2", "async_smollm2"])
def test_samples_of_invokes(engine: str, smollm2: Any, request: pytest.FixtureRequest) -> None:
    with smollm2.trace(PROMPT, n=3, seed=5, **SAMPLING) as alone:
        pass
    expected = [list(completion.token_ids) for completion in alone.result.outputs]
    tracer = invoke_several(request.getfixturevalue(engine))
    if engine == "async_smollm2":
        outputs = run(outputs_of(tracer))
        assert {(output.invoke, output.outputs[0].index) for output in outputs} == {
            (0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)
        }  # fmt: skip
    one, three, two = tracer.invokes
    assert one.saves == {"shift": 100} and three.saves["tokens"] == expected
    assert sorted(tracer.saves["seen"]) == sorted(tokens[0] for tokens in expected)
    assert [list(completion.token_ids) for completion in three.result.outputs] == expected
    assert [list(completion.token_ids) for completion in two.result.outputs] == [[100], [100]]


@pytest.mark.parametrize("engine", ["smollm2", "async_smollm2"])
def test_samples_take_copies(engine: str, request: pytest.FixtureRequest) -> None:
    """What one did to a value that was handed on was seen by the others."""
    model = request.getfixturevalue(engine)
    with model.trace(seed=5, **SAMPLING) as tracer:
        seen = save([])
        with tracer.invoke(OTHER):
            rows, nested = torch.zeros(3), {"a": [torch.ones(2)], "layer": model.model.layers[3], "all": seen}
            alias = nested["a"][0]
        with tracer.invoke(PROMPT, n=3, max_tokens=1):
            rows += 1
            alias += 1
            nested["a"].append(nested["layer"].output[0].shape[1])
            nested["all"].append((rows, nested["a"]))
    if engine == "async_smollm2":
        run(outputs_of(tracer))
    assert len(tracer.saves["seen"]) == 3
    for rows, items in tracer.saves["seen"]:
        assert rows.tolist() == [1, 1, 1] and len(items) == 2
        assert items[0].tolist() == [2, 2] and items[1] == 576


def test_what_only_one_sample_can_do(smollm2: Any) -> None:
    with pytest.raises(MisuseError, match="invoke 0 has `n=2` and hands `h` on to a later one"):
        with smollm2.trace(**SAMPLING) as tracer:
            with tracer.invoke(PROMPT, n=2):
                h = 1
            with tracer.invoke(PROMPT):
                save(h)
    with pytest.raises(MisuseError, match="invoke 1 has `n=2` and has a barrier"):
        with smollm2.trace(**SAMPLING) as tracer:
            meet = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                meet()
            with tracer.invoke(PROMPT, n=2):
                meet()
