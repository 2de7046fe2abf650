"""No block can hold up or fill up the engine: it is ended with an error that has the numbers, and all else goes on.

The limits are small here, so the models are of these tests alone: a tiny one in an engine in this process, and the
same one in transformers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from invivo import VLLM, Local, MemoryLimitError, SaveLimitError, TimeLimitError
from invivo.interleaver.memory import Memory
from invivo.interleaver.watchdog import WATCHDOG
from smollm2 import smollm2_path
from support.batch import Batch
from support.checkpoints import tiny_checkpoint
from support.contract import PROMPT, assert_raised_at, tokens
from support.reference import Reference

LIMITS: dict[str, Any] = {"time_limit": 2, "memory_limit": 100 << 20, "save_limit": 1 << 20}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 2**27,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def tiny() -> Reference:
    return Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with VLLM(str(tiny_checkpoint("llama", tokenizer=smollm2_path())), **ENGINE, **LIMITS) as model:
            yield model.dispatch()  # now, as the tests look at the time


@pytest.fixture(params=["local", pytest.param("vllm", marks=pytest.mark.engine)])
def limited(request: pytest.FixtureRequest, tiny: Reference) -> Iterator[Any]:
    """The tiny model on each backend; nothing is left of a trace afterwards, and the next one is right."""
    if request.param == "vllm":
        model: Any = request.getfixturevalue("engine")
    else:
        from transformers import AutoTokenizer

        model = Local(tiny.model, AutoTokenizer.from_pretrained(smollm2_path()), **LIMITS)
    yield model
    assert_right(model, tiny)


def ids(model: Any) -> list[int]:
    tokenizer = model.tokenizer if isinstance(model, VLLM) else model._tokenizer
    return list(tokenizer(PROMPT)["input_ids"])


def assert_right(model: Any, tiny: Reference) -> None:
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        chosen = list().save()
        for _ in tracer.iter[:]:
            model.model.layers[1].mlp.output
            chosen.append(model.samples.item())
    assert tokens(tracer) == chosen == tiny.run(ids(model), 3, record=False).tokens
    model.check_integrity()
    assert not WATCHDOG._guards


def repeat(action: Callable[[], object]) -> None:
    """Do something without end."""
    while True:
        action()


def test_a_loop_without_end(limited: Any) -> None:
    model = limited
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"went on for [2-9]\.\d seconds .* limit is 2;") as caught:
        with model.trace(PROMPT, max_tokens=9, **GREEDY):
            kept = model.model.layers[0].mlp.output.save()
            repeat(list)  # <without end>
    assert time.monotonic() - began < 10
    assert_raised_at(caught.value, __file__, "without end")
    assert caught.value.__notes__ == ["at port model.layers.0.mlp.output, step 0"]
    assert list(caught.value.saves) == ["kept"]  # type: ignore[attr-defined]


def test_one_that_catches_everything(limited: Any) -> None:
    model = limited
    with pytest.raises(TimeLimitError):
        with model.trace(PROMPT, max_tokens=9, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                while True:
                    try:
                        sum(range(1000))
                        model.logits
                        time.sleep(0.01)
                    except:  # noqa: E722  # the point of it
                        time.sleep(0.001)


def test_one_that_catches_what_errors_are_caught_by(limited: Any) -> None:
    model = limited
    with pytest.raises(TimeLimitError):
        with model.trace(PROMPT, max_tokens=9, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                with contextlib.suppress(Exception):
                    time.sleep(100)


def test_time_that_many_turns_take_together_is_no_matter(limited: Any) -> None:
    model = limited
    with model.trace(PROMPT, max_tokens=5, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[0].output
            time.sleep(0.5)
            model.logits
    assert len(tokens(tracer)) == 5


def test_a_wait_in_the_end_of_a_block(limited: Any) -> None:
    """It runs after the request has ended, in the client's call for the saves."""
    model = limited
    with pytest.raises(TimeLimitError) as caught:
        with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
            logits = model.logits.save()
            tracer.result
            time.sleep(100)
    assert list(caught.value.saves) == ["logits"]  # type: ignore[attr-defined]


def test_memory_without_end(limited: Any) -> None:
    model, memory = limited, Memory()
    before = memory.resident()
    with pytest.raises(MemoryLimitError, match=r"added [\d.]+ [MG]iB .* limit is 100\.0 MiB") as caught:
        with model.trace(PROMPT, max_tokens=9, **GREEDY):
            kept = model.model.layers[0].mlp.output.save()
            xs = []
            repeat(lambda: xs.append(b"x" * 10**7))  # <filling>
    assert_raised_at(caught.value, __file__, "filling")
    assert list(caught.value.saves) == ["kept"]  # type: ignore[attr-defined]
    assert memory.resident() - before < 50 << 20


def test_saves_without_end(limited: Any) -> None:
    model = limited
    with pytest.raises(SaveLimitError, match=r"hold 1\.\d MiB, and the limit is 1\.0 MiB") as caught:
        with model.trace(PROMPT, max_tokens=100, **GREEDY) as tracer:
            first = model.model.layers[0].mlp.output.save()
            seen = list().save()
            for _ in tracer.iter[:]:
                seen.append(torch.zeros(10**4))
                model.logits
    assert "at port model.logits, step" in caught.value.__notes__[0]
    assert list(caught.value.saves) == ["first"]  # type: ignore[attr-defined]


def test_more_saved_at_the_end_than_the_limit(limited: Any) -> None:
    model = limited
    with pytest.raises(SaveLimitError, match=r"hold 4\.0 MiB") as caught:
        with model.trace(PROMPT, max_tokens=1, **GREEDY):
            large = torch.zeros(10**6).save()
            small = model.logits.save()
    assert list(caught.value.saves) == ["small"]  # type: ignore[attr-defined]


@pytest.mark.engine
def test_plain_requests_in_the_same_batch_finish_with_their_tokens(engine: VLLM, tiny: Reference) -> None:
    model: Any = engine
    batch, threads = Batch(model), threading.active_count()
    batch.plain(PROMPT, max_tokens=8, **GREEDY)
    with batch.traced(PROMPT, max_tokens=8, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            model.model.layers[1].mlp.output[:] = 1
            while step == 2:
                with contextlib.suppress(BaseException):
                    len([step])
    with batch.traced(PROMPT, max_tokens=8, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            xs = [model.model.layers[0].output]
            while step == 1:
                xs.append(b"x" * 10**7)
    with batch.traced(PROMPT, max_tokens=100, **GREEDY) as tracer:
        saved = list().save()
        for _ in tracer.iter[:]:
            saved.append(torch.zeros(10**5))
            model.logits
    first, timed, filled, saving = batch.run()
    assert first.tokens == tiny.run(ids(model), 8, record=False).tokens
    assert [type(member.error) for member in (timed, filled, saving)] == [
        TimeLimitError,
        MemoryLimitError,
        SaveLimitError,
    ]
    assert len(timed.tokens) == 3
    assert len(filled.tokens) == 2
    assert threading.active_count() <= threads + 1
    assert_right(model, tiny)


@pytest.mark.engine
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError("no"), RecursionError("deep")]
)
def test_exceptions_that_usually_end_a_process_end_the_block(engine: VLLM, tiny: Reference, error: Any) -> None:
    model: Any = engine
    kind, args = type(error), error.args
    with pytest.raises(kind):
        with model.trace(PROMPT, max_tokens=3, **GREEDY):
            model.model.layers[0].output
            raise kind(*args)
    assert_right(model, tiny)


@pytest.mark.engine
def test_a_recursion_without_end_and_a_thread_that_goes_on(engine: VLLM, tiny: Reference) -> None:
    model: Any = engine
    with pytest.raises(RecursionError):
        with model.trace(PROMPT, max_tokens=3, **GREEDY):
            f = lambda: f()  # noqa: E731
            model.model.layers[0].output
            f()
    with model.trace(PROMPT, max_tokens=3, **GREEDY):
        threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
    assert_right(model, tiny)
