"""Several prompts in one trace of an asynchronous engine: outputs of all as they come, and what invokes share."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest
import torch

from invivo import InvivoWarning, InvokeError, MisuseError, OutsideBlockError, SamplingError
from support.contract import OTHER, PROMPT, assert_raised_at, prompt_ids, result_tokens, same, stream
from support.reference import Edit, Reference
from support.streams import LONG, STEPS, outputs_of, run

pytestmark = pytest.mark.engine

PROMPTS = [PROMPT, OTHER, "The Colosseum is in the city of", "Water boils at"]
LAYER = "model.layers.10"
ONE: dict[str, Any] = {"max_tokens": 1, "temperature": 0}


def endless(model: Any) -> Any:
    """Two long requests, one that waits for the first, and one that waits at a barrier for it."""
    with model.trace(**LONG) as tracer:
        seen = list().save()
        meet = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            for step in tracer.iter[:]:
                h = model.model.layers[5].mlp.output[-1].save(stream=True)
                seen.append(step)
            meet()
        with tracer.invoke(OTHER):
            for step in tracer.iter[:]:
                h = model.model.layers[5].mlp.output[-1].save(stream=True)
        with tracer.invoke(OTHER):
            h.save()
        with tracer.invoke(OTHER):
            meet()
    return tracer


# --- values


def test_outputs_of_all_invokes_as_they_come(async_smollm2: Any, reference: Reference) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(**STEPS) as tracer:
            seen = list().save()
            number = (3 + 4).save()
            with tracer.invoke(PROMPT) as one:
                for step in tracer.iter[:]:
                    h = stream(model.model.layers[10]).save(stream=True)
            with tracer.invoke(OTHER, max_tokens=3) as two:
                for step in tracer.iter[:]:
                    token = model.samples.item().save(stream=True)
                    seen.append(token)
        assert "seen" not in locals() and "h" not in locals()
        with pytest.raises(OutsideBlockError, match="the last output of the invoke has been taken"):
            one.saves
        with pytest.raises(OutsideBlockError, match="with the tracer of the trace"):
            one.backend
        outputs = await outputs_of(tracer)
        own = [[output for output in outputs if output.invoke == invoke] for invoke in (0, 1)]
        expected = [reference.run(prompt_ids(model, prompt), 6, record=prompt == PROMPT) for prompt in (PROMPT, OTHER)]
        assert [[output.finished for output in each] for each in own] == [[False] * 5 + [True], [False] * 2 + [True]]
        for step, output in enumerate(own[0]):
            assert same(output.saves["h"], expected[0].steps[step].output(LAYER))
            assert result_tokens(output) == expected[0].tokens[: step + 1]
        tokens = expected[1].tokens[:3]
        assert [output.saves["token"] for output in own[1]] == tokens == result_tokens(two.result)
        assert tracer.saves["seen"] == tokens and tracer.saves["number"] == 7
        assert set(one.saves) == {"h"} and torch.equal(one.saves["h"], own[0][-1].saves["h"])
        assert set(two.saves) == {"token"}
        assert set(tracer.saves) == {"h", "token", "seen", "number"}
        assert tracer.results == tracer.result == [own[0][-1], own[1][-1]]
        assert {"seen", "number"} <= set(outputs[-1].saves)

    run(main())


def test_patching_between_invokes_equals_the_reference(async_smollm2: Any, reference: Reference) -> None:
    model = async_smollm2
    address = "model.layers.12.mlp"
    donor = reference.run(prompt_ids(model), 1).steps[0].output(address)[-1]

    def put(rows: torch.Tensor) -> None:
        rows[-1] = donor

    expected = reference.run(prompt_ids(model, OTHER), 3, [Edit(address, "output", 0, put)], record=False)

    async def main() -> None:
        with model.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT):
                h = model.model.layers[12].mlp.output[-1].clone()
            with tracer.invoke(OTHER):
                model.model.layers[12].mlp.output[-1] = h
                logits = model.logits.save()
        saves = await tracer
        assert set(saves) == {"logits"} and same(saves["logits"], expected.steps[0].logits)
        assert result_tokens(tracer.results[1]) == expected.tokens

    run(main())


def test_eight_traces_of_four_invokes_on_one_loop(async_smollm2: Any, reference: Reference) -> None:
    """Each with a shared list, a barrier and a value that is handed on."""
    model = async_smollm2

    def start(number: int) -> Any:
        with model.trace(max_tokens=2, temperature=0, ignore_eos=True) as tracer:
            seen = list().save()
            box: dict[str, Any] = {}
            meet = tracer.barrier(2)
            with tracer.invoke([17, 31, 100 + number]):
                h = stream(model.model.layers[10])
                box["h"] = h
                seen.append(0)
                meet()
            with tracer.invoke([17, 31, 5, 100 + number]):
                meet()
                norm = box["h"].norm().item().save()
                seen.append(1)
            with tracer.invoke([100 + number, 9]):
                shape = tuple(h.shape).save()
                seen.append(2)
            with tracer.invoke([100 + number]):
                last = h[-1].save()
                token = model.samples.item().save(stream=True)
                seen.append(3)
        return tracer

    async def main() -> list[Any]:
        tracers = [start(number) for number in range(8)]
        await asyncio.gather(*tracers)
        return tracers

    for number, tracer in enumerate(run(main())):
        expected = reference.run([17, 31, 100 + number], 1).steps[0].output(LAYER)
        assert same(tracer.saves["last"], expected[-1]), number
        assert tracer.saves["shape"] == (3, 576)
        assert tracer.saves["norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
        assert sorted(tracer.saves["seen"]) == [0, 1, 2, 3]
        token = reference.run([100 + number], 1, record=False).tokens
        assert result_tokens(tracer.results[3])[:1] == token == [tracer.saves["token"]]


def test_a_shared_list_is_complete_and_in_order(async_smollm2: Any) -> None:
    model = async_smollm2

    async def main() -> list[tuple[int, int]]:
        with model.trace(**STEPS) as tracer:
            seen = list().save()
            meet = tracer.barrier(len(PROMPTS))
            for number, prompt in enumerate(PROMPTS):
                with tracer.invoke(prompt):
                    meet()
                    for step in tracer.iter[1:]:
                        model.model.layers[3].output
                        seen.append((step, number))
        return (await tracer)["seen"]

    assert run(main()) == [(step, number) for step in range(1, 6) for number in range(len(PROMPTS))]


def test_blocks_meet_at_a_barrier_in_one_step(async_smollm2: Any) -> None:
    """The later one waits, by not being scheduled, until the one before it stands there."""
    model = async_smollm2

    async def main() -> None:
        with model.trace(**ONE) as tracer:
            meet = tracer.barrier(2)
            box: dict[str, Any] = {}
            with tracer.invoke(PROMPT):
                box["h"] = model.model.layers[12].mlp.output[-1].clone()
                meet()
            with tracer.invoke(OTHER):
                meet()
                model.model.layers[12].mlp.output[-1] = box["h"]
                token = model.samples.item().save()
        await tracer
        assert [len(result_tokens(result)) for result in tracer.results] == [1, 1]

    run(main())


# --- errors


def test_a_barrier_in_vain_while_the_engine_is_busy(async_smollm2: Any) -> None:
    """It waited as long as others ran: the requests that it was to meet were over, and their blocks were not."""
    model = async_smollm2

    async def main() -> None:
        busy = [asyncio.ensure_future(outputs_of(endless(model))) for _ in range(2)]
        with model.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
            meet = tracer.barrier(2)
            met = list().save()
            for number in range(3):
                with tracer.invoke(PROMPT):
                    for step in tracer.iter[:]:
                        meet()
                        met.append((number, step))
        with pytest.raises(InvokeError, match=r"invoke 2 waited .* ended before: invokes 0, 1; the trace has 3"):
            await tracer
        assert tracer.saves["met"] == [(number, step) for step in range(3) for number in range(2)]
        assert not any(task.done() for task in busy)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)

    run(main())


def test_an_invoke_that_raises(async_smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(max_tokens=4, temperature=0, ignore_eos=True) as tracer:
            seen = list().save()
            with tracer.invoke(PROMPT) as good:
                for step in tracer.iter[:]:
                    a = step
                    a.save(stream=True)
                seen.append("a")
            with tracer.invoke(OTHER) as bad:
                b = model.model.layers[1].mlp.output.save(stream=True)
                print("soon")
                b @ torch.ones(3)  # <wrong size>
        outputs = []
        with pytest.raises(RuntimeError) as caught:
            async for output in tracer.backend:
                outputs.append(output)  # noqa: PERF401  # those before the error count
        assert [output.saves["a"] for output in outputs if output.invoke == 0] == [0, 1, 2, 3]
        (failed,) = [output for output in outputs if output.invoke == 1]
        assert failed.finished and set(failed.saves) == {"b"}
        assert_raised_at(caught.value, __file__, "wrong size")
        assert "in invoke 1 of 0 to 1" in caught.value.__notes__
        assert caught.value.saves == tracer.saves  # type: ignore[attr-defined]
        assert set(tracer.saves) == {"a", "b", "seen"} and tracer.saves["seen"] == ["a"]
        assert good.saves == {"a": 3} and set(bad.saves) == {"b"}

    run(main())
    assert capsys.readouterr().out == "soon\n"


def test_errors_where_the_trace_is_awaited(async_smollm2: Any) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(**ONE) as tracer:
            with tracer.invoke(PROMPT):
                if model.logits.sum() == 0.5:
                    h = 1
            with tracer.invoke(PROMPT):
                h.save()
        with pytest.raises(InvokeError, match="invoke 1 reads `h`, which invoke 0 was to hand on, and that one ended"):
            await tracer
        with model.trace(**ONE) as tracer:
            meet = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                meet()
            with tracer.invoke(OTHER):
                if model.logits.sum() == 0.5:
                    meet()
        with pytest.raises(InvokeError, match=r"too few of the others can come any more\. At the barrier: invoke 0"):
            await tracer
        with pytest.raises(MisuseError, match="made no invoke"):
            with model.trace(**ONE):
                pass
        with pytest.raises(KeyError, match="missing"):
            with model.trace(**ONE) as tracer:
                with tracer.invoke(PROMPT):
                    pass
                {}["missing"]

    run(main())


def test_a_request_that_vllm_refuses_ends_all(async_smollm2: Any) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(**LONG) as tracer:
            meet = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                meet()
            with tracer.invoke(OTHER, logit_bias={10**7: 1.0}):
                meet()
        with pytest.raises(SamplingError, match="out-of-vocab"):
            await tracer
        model.check_integrity()

    run(main())


def test_warnings(async_smollm2: Any) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(**ONE) as tracer:
            for prompt in PROMPTS[:2]:
                with tracer.invoke(prompt):
                    n = model.model.layers[0].output[0].shape[0].save()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await tracer
        (message,) = [str(entry.message) for entry in caught if entry.category is InvivoWarning]
        assert message.startswith("`n` was saved by invokes 0 and 1: the name holds what the last one saved.")

    run(main())


# --- leaving early; what is left in the engine is looked at after each test


@pytest.mark.parametrize("count", [0, 3])
def test_leaving_the_loop_ends_all_invokes(async_smollm2: Any, count: int) -> None:
    async def main() -> None:
        tracer = endless(async_smollm2)
        taken = 0
        async for output in tracer.backend:
            assert output.invoke in (0, 1) and "h" in output.saves
            taken += 1
            if taken > count:
                break
        await asyncio.sleep(0)
        async_smollm2.check_integrity()
        with pytest.raises(OutsideBlockError, match="once the last output has been taken"):
            tracer.saves

    run(main())


def test_traces_of_invokes_that_nobody_waits_for(async_smollm2: Any) -> None:
    async def main() -> None:
        tracer = endless(async_smollm2)
        await asyncio.sleep(0.1)
        gc.disable()
        try:
            del tracer  # nothing else holds it, and no cycle does
            async_smollm2.check_integrity()
        finally:
            gc.enable()
        tracer = endless(async_smollm2)
        await tracer.backend.aclose()
        async_smollm2.check_integrity()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await endless(async_smollm2)
        async_smollm2.check_integrity()

    run(main())


def test_finished_invokes_that_nobody_reads_keep_their_outputs(async_smollm2: Any) -> None:
    model = async_smollm2

    async def main() -> None:
        with model.trace(**STEPS) as tracer:
            for prompt in PROMPTS[:2]:
                with tracer.invoke(prompt):
                    for step in tracer.iter[:]:
                        number = step
                        number.save(stream=True)
        await asyncio.sleep(1)
        model.check_integrity()
        outputs = await outputs_of(tracer)
        assert [output.saves["number"] for output in outputs if output.invoke == 1] == [0, 1, 2, 3, 4, 5]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InvivoWarning)
        run(main())
