"""Traces where another one is under way: in threads, hooks, signal handlers, other traces, and forked processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from invivo import VLLM, CaptureError, Local, MisuseError
from support.contract import PROMPT, assert_serves, tokens
from support.toy_module import Toy


def test_threads_that_trace_and_use_the_same_module() -> None:
    module = Toy()
    model: Any = Local(module)
    wrong: list[object] = []

    def work(number: int) -> None:
        x = torch.full((3, 4), float(number))
        for _ in range(10):
            try:
                with model.trace(x):
                    noise = torch.rand(1).save()
                    inner = model.first.output.save()
                    out = model.last.output.save()
                with torch.no_grad():
                    right = torch.equal(out, module(x)) and torch.equal(inner, module.first(x))
                if not right or noise != expected:
                    wrong.append(number)
            except BaseException as error:
                wrong.append(error)

    with model.trace(torch.ones(1, 4)):
        expected = torch.rand(1).save()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    model.check_integrity()


def test_a_trace_in_the_middle_of_another_one_of_the_same_model() -> None:
    module = Toy()
    model: Any = Local(module)
    x = torch.ones(2, 4)

    def hook(*_: object) -> None:
        with model.trace(x):
            model.first.output.save()

    handle = module.first.register_forward_hook(hook)
    with pytest.raises(MisuseError, match="begun in the middle of another one"):
        with model.trace(x):
            model.last.output
    handle.remove()
    model.check_integrity()
    with model.trace(x):
        out = model.last.output.save()
    with torch.no_grad():
        assert torch.equal(out, module(x))


def interrupted(do: Callable[[], object], seconds: float) -> list[BaseException]:
    """Have a signal handler call `do` after some time; errors that it raised come in the list."""
    raised: list[BaseException] = []

    def handler(*_: object) -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return raised


def test_a_trace_in_a_signal_handler(smollm2: Any) -> None:
    """It took the output of the trace that it interrupted, which then waited for ever."""
    model = smollm2

    def trace() -> None:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.logits.save()

    before = signal.getsignal(signal.SIGALRM)
    try:
        raised = interrupted(trace, 0.3)
        with model.trace(PROMPT, max_tokens=30, temperature=0, ignore_eos=True) as tracer:
            import time

            for _ in tracer.iter[:]:
                time.sleep(0.03)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    (error,) = raised
    assert isinstance(error, MisuseError)
    assert "in the middle of a trace of the same thread" in str(error)
    assert len(tokens(tracer)) == 30
    assert_serves(model)


def test_traces_within_traces_are_refused() -> None:
    toy: Any = Local(Toy())
    x = torch.ones(2, 4)
    with pytest.raises(CaptureError, match="a trace inside of another one"):
        with toy.trace(x):
            toy.first.output
            with toy.trace(x):
                toy.last.output


@pytest.mark.engine
def test_a_forked_process_leaves_the_engine_alone(smollm2: VLLM, tmp_path: Path) -> None:
    model, report = smollm2, tmp_path / "report"
    model.dispatch()
    child = os.fork()
    if child == 0:
        try:
            with model.trace(PROMPT, max_tokens=1):
                pass
        except BaseException as error:
            report.write_text(f"{type(error).__name__}: {error}")
        model.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert "EngineClosedError: the engine of" in report.read_text()
    assert f"belongs to process {os.getpid()}" in report.read_text()
    assert_serves(model)


def test_requests_that_wait_in_the_engine_are_not_lost(smollm2: Any) -> None:
    smollm2.engine.enqueue(["The"], use_tqdm=False)
    with pytest.raises(MisuseError, match="wait_for_completion"):
        with smollm2.trace(PROMPT, max_tokens=1, temperature=0):
            pass
    assert len(smollm2.engine.wait_for_completion(use_tqdm=False)) == 1
    assert_serves(smollm2)
