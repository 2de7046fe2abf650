"""Asynchronous engines of several workers: outputs as they come, callers that leave, many traces at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any, cast

import pytest

from contract.test_architectures import PROMPT
from invivo import VLLM, InvivoError
from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.compare import errors
from support.contract import BOUND, TINY_ENGINE, stream
from support.reference import Reference
from support.streams import outputs_of, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORKERS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
STEPS: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=WORKERS)
def llama(request: pytest.FixtureRequest) -> Iterator[VLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        if "pp" in request.param:
            patch.setenv("VLLM_PP_LAYER_PARTITION", "2,1")
        path = tiny_checkpoint("llama", tokenizer=smollm2_path())
        arguments = {**TINY_ENGINE, "enforce_eager": True, "max_num_seqs": 16, **WORKERS[request.param]}
        with VLLM(str(path), mode="async", **arguments) as model:
            yield model


@pytest.fixture(autouse=True)
def _nothing_left(llama: VLLM) -> Iterator[None]:
    yield
    llama.check_integrity()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))


def streamed(model: Any, prompt: list[int], **sampling: Any) -> Any:
    with model.trace(prompt, **{**STEPS, **sampling}) as tracer:
        for _ in tracer.iter[:]:
            h = stream(model.model.layers[0]).save(stream=True)
            late = model.model.layers[2].mlp.act_fn.output.save(stream=True)
            token = model.samples.item()
            token.save(stream=True)
        process = [os.getpid()].save()
    return tracer


def test_values_come_with_the_outputs_of_their_steps(llama: VLLM, reference: Reference) -> None:
    expected = reference.run(PROMPT, 6)
    outputs = run(outputs_of(streamed(llama, PROMPT)))
    assert len(outputs) == 6
    for output, step, token in zip(outputs, expected.steps, expected.tokens, strict=True):
        assert errors(output.saves["h"], step.output("model.layers.0")) < BOUND
        assert errors(output.saves["late"], step.input("model.layers.2.mlp.down_proj")) < BOUND
        assert output.saves["token"] == output.outputs[0].token_ids[-1] == token


def test_many_at_once_and_some_that_leave(llama: VLLM, reference: Reference) -> None:
    prompts = [[*PROMPT[:3], number] for number in range(12)]

    async def leave(tracer: Any) -> None:
        async for _ in tracer.backend:
            break

    async def main() -> list[Any]:
        stay = [streamed(llama, prompt) for prompt in prompts]
        go = [streamed(llama, prompt, max_tokens=100) for prompt in prompts[:4]]
        done = await asyncio.gather(*map(outputs_of, stay), *map(leave, go))
        return [(done[at], tracer.saves["process"][0]) for at, tracer in enumerate(stay)]

    found = run(main())
    for prompt, (outputs, _) in zip(prompts, found, strict=True):
        expected = reference.run(prompt, 6)
        assert [output.saves["token"] for output in outputs] == expected.tokens
        assert all(
            errors(output.saves["h"], step.output("model.layers.0")) < BOUND
            for output, step in zip(outputs, expected.steps, strict=True)
        )
    engines = cast(Any, llama._engine)._arguments.get("data_parallel_size", 1)
    assert len({process for _, process in found}) == engines


def test_invokes_hand_values_over_and_meet(llama: VLLM) -> None:
    async def main() -> Any:
        with llama.trace(**STEPS) as tracer:
            shapes = list().save()
            meet = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[:]:
                    late = llama.model.layers[2].mlp.output
            with tracer.invoke(PROMPT):
                llama.model.layers[0].mlp.output[-1] = late[-1]
                shapes.append(list(late.shape))
                patched = llama.logits.save()
                meet()
            with tracer.invoke(PROMPT):
                plain = llama.logits.save()
                meet()
        await tracer
        return tracer.saves

    saves = run(main())
    assert saves["shapes"] == [[1, 128]]
    assert saves["patched"].shape == saves["plain"].shape == (1, 49_152)
    assert errors(saves["patched"], saves["plain"]) > BOUND


def test_an_error_and_a_large_save(llama: VLLM) -> None:
    async def main() -> Any:
        with llama.trace(PROMPT * 10, max_tokens=2, ignore_eos=True) as wrong:
            llama.model.layers[0].output
            raise KeyError("mine")
        with llama.trace(PROMPT * 10, max_tokens=2, ignore_eos=True) as right:
            large = [llama.logits.expand(20, -1).clone() for _ in right.iter[:]].save()
        with pytest.raises(KeyError, match="mine"):
            await wrong
        await right
        return right.saves["large"]

    large = run(main())
    assert [list(one.shape) for one in large] == [[20, 49_152]] * 2


def test_a_step_that_is_not_there_is_a_typed_error(llama: VLLM) -> None:
    async def main() -> None:
        with llama.trace(PROMPT, max_tokens=1) as tracer:
            llama.model.layers[2].output
            llama.model.layers[0].output
        await tracer

    with pytest.raises(InvivoError, match="has passed"):
        run(main())
