"""Asynchronous engines: many traces at once, on several loops, and slow readers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from invivo import OutsideBlockError
from support.contract import same, tokens
from support.streams import outputs_of, run, streamed_trace

pytestmark = pytest.mark.engine


def test_many_traces_on_one_loop_and_on_the_next(async_smollm2: Any) -> None:
    model = async_smollm2

    async def consume(number: int) -> tuple[list[Any], Any]:
        tracer = streamed_trace(model, [17, 31, 5, 100 + number], max_tokens=2 + number % 4)
        return await outputs_of(tracer), tracer

    async def main() -> list[tuple[list[Any], Any]]:
        return await asyncio.gather(*(consume(number) for number in range(64)))

    runs = [run(main()) for _ in range(2)]
    for number in range(64):
        for outputs, tracer in (runs[0][number], runs[1][number]):
            assert len(outputs) == 2 + number % 4
            for output, state in zip(outputs, tracer.saves["states"], strict=True):
                assert torch.equal(output.saves["h"], state)
        one, two = (runs[at][number][1] for at in range(2))
        assert tokens(one) == tokens(two)
        assert same(one.saves["states"][0], two.saves["states"][0])
    first = [runs[0][number][1].saves["states"][0] for number in range(64)]
    assert not same(first[0][-1], first[1][-1])


def test_all_records_of_32_requests_at_once_arrive(async_smollm2: Any) -> None:
    """Field report F32: all layers of each, which comes to 960 records."""
    model = async_smollm2

    def start(number: int) -> Any:
        with model.trace([17, 31, 5, 100 + number], max_tokens=2, temperature=0, ignore_eos=True) as tracer:
            states = [layer.output[0] for layer in model.model.layers].save()
        return tracer

    async def main() -> list[dict[str, Any]]:
        return await asyncio.gather(*(start(number).backend.collect() for number in range(32)))

    saves = run(main())
    assert [len(one["states"]) for one in saves] == [30] * 32
    alone = run(start(7).backend.collect())
    assert all(same(one, other) for one, other in zip(saves[7]["states"], alone["states"], strict=True))


def test_a_trace_that_was_started_without_a_loop_and_taken_on_two(async_smollm2: Any) -> None:
    tracer = streamed_trace(async_smollm2)
    outputs = tracer.backend.__aiter__()
    with pytest.raises(OutsideBlockError, match="once the last output has been taken"):
        tracer.saves

    async def take(count: int) -> list[Any]:
        return [await anext(outputs) for _ in range(count)]

    assert len(run(take(2)) + run(take(4))) == 6
    assert len(tracer.saves["states"]) == 6


def test_a_slow_reader_gets_every_output(async_smollm2: Any) -> None:
    async def main() -> None:
        tracer = streamed_trace(async_smollm2)
        await asyncio.sleep(1)
        outputs = await outputs_of(tracer)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
        assert all("h" in output.saves for output in outputs)

    run(main())
