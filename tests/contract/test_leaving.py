"""Asynchronous engines: every way to leave a trace before its end; what is left is looked at after each test too."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import aclosing
from typing import Any

import pytest

import invivo
from invivo import EngineClosedError, MisuseError
from support.streams import endless, outputs_of, run, streamed_trace

pytestmark = pytest.mark.engine


def test_leaving_the_loop(async_smollm2: Any) -> None:
    async def main() -> None:
        tracer = endless(async_smollm2)
        async for output in tracer.backend:
            if len(output.outputs[0].token_ids) == 3:
                break
        await asyncio.sleep(0)
        async_smollm2.check_integrity()
        with pytest.raises(MisuseError, match="were taken before"):
            async for output in tracer.backend:
                pass

    run(main())


def test_an_exception_in_the_loop(async_smollm2: Any) -> None:
    async def main() -> None:
        with pytest.raises(KeyError):
            async for output in endless(async_smollm2).backend:
                output.saves["no such name"]
        async_smollm2.check_integrity()

    run(main())


def test_a_cancelled_task(async_smollm2: Any) -> None:
    async def main() -> None:
        tracers = [endless(async_smollm2) for _ in range(3)]
        tasks = [asyncio.ensure_future(outputs_of(tracer)) for tracer in tracers]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(done, asyncio.CancelledError) for done in await asyncio.gather(*tasks, return_exceptions=True)
        )
        async_smollm2.check_integrity()

    run(main())


def test_a_timeout(async_smollm2: Any) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await endless(async_smollm2)
        async_smollm2.check_integrity()

    run(main())


def test_closing(async_smollm2: Any) -> None:
    async def main() -> None:
        tracer = endless(async_smollm2)
        async with aclosing(tracer.backend):
            async for output in tracer.backend:
                break
        unread = endless(async_smollm2)
        await unread.backend.aclose()
        await unread.backend.aclose()
        async_smollm2.check_integrity()

    run(main())


def test_closing_while_others_wait(async_smollm2: Any) -> None:
    """They waited for ever: a loop over the outputs ends, and who awaits the end is told."""

    async def main() -> None:
        looping, awaited = endless(async_smollm2), endless(async_smollm2)
        tasks = [asyncio.ensure_future(outputs_of(looping)), asyncio.ensure_future(awaited.backend.collect())]
        await asyncio.sleep(0.1)
        for tracer in (looping, awaited):
            await tracer.backend.aclose()
        assert len(await asyncio.wait_for(tasks[0], 5)) < 400
        with pytest.raises(MisuseError, match=r"was ended \(`tracer.backend.aclose\(\)`\) while its end was awaited"):
            await asyncio.wait_for(tasks[1], 5)
        async_smollm2.check_integrity()

    run(main())


def test_two_tasks_that_take_outputs(async_smollm2: Any) -> None:
    """The first of them waited for ever."""

    async def main() -> None:
        outputs = aiter(streamed_trace(async_smollm2).backend)
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        with pytest.raises(MisuseError, match="come to one task, and another one waits"):
            await anext(outputs)
        assert len((await first).outputs[0].token_ids) == 1
        assert len([output async for output in outputs]) == 5

    run(main())


def test_traces_that_nobody_waits_for(async_smollm2: Any) -> None:
    for wait in (0, 0.2):
        tracer = endless(async_smollm2)
        outputs = endless(async_smollm2).backend.__aiter__()
        time.sleep(wait)
        del tracer, outputs
        gc.collect()
        async_smollm2.check_integrity()


def test_a_finished_trace_that_nobody_reads(async_smollm2: Any) -> None:
    tracer = streamed_trace(async_smollm2)
    time.sleep(1)
    async_smollm2.check_integrity()
    assert len(run(outputs_of(tracer))) == 6


def test_others_go_on(async_smollm2: Any) -> None:
    async def main() -> None:
        left, staying = endless(async_smollm2), streamed_trace(async_smollm2, max_tokens=30)
        async for _ in left.backend:
            break
        outputs = await outputs_of(staying)
        assert len(outputs) == 30

    run(main())


def test_a_closed_engine() -> None:
    from smollm2 import smollm2_path
    from support.checkpoints import tiny_checkpoint
    from support.contract import ENGINE

    path = str(tiny_checkpoint("llama", tokenizer=smollm2_path()))

    async def main() -> None:
        model = invivo.VLLM(path, mode="async", **{**ENGINE, "max_model_len": 128})
        tracers = []
        for _ in range(2):
            with model.trace([1, 2, 3], max_tokens=100, ignore_eos=True) as tracer:
                for step in tracer.iter[:]:
                    time.sleep(0.1)
            tracers.append(tracer)
        tracer, unread = tracers
        waiting = asyncio.ensure_future(outputs_of(tracer))
        await asyncio.sleep(1)
        model.close()
        for attempt in (waiting, outputs_of(unread)):
            with pytest.raises(EngineClosedError, match="was closed"):
                await attempt
        with pytest.raises(EngineClosedError):
            model.trace([1, 2, 3])
        model.close()

    run(main())
