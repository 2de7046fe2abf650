"""No memory, hook, greenlet or process is left behind: not after many traces, not when the client ends in any way."""

from __future__ import annotations

import gc
import statistics
import warnings
from pathlib import Path
from typing import Any

import greenlet
import psutil
import pytest
import torch

from support.contract import PROMPT, assert_serves
from support.processes import (
    assert_killing_leaves_no_process,
    descendants,
    finish,
    named_by,
    resident,
    start_script,
    still_there,
)

pytestmark = pytest.mark.engine

GROWTH = 4.0
"""MiB that a process may differ by between the first and the last traces: allocators keep some pages for later."""


def one_trace(model: Any, number: int) -> None:
    """A trace of one of several kinds."""
    prompt, count = [17, 31, 5, 6, 40 + number % 7], 1 + number % 3
    sampling: dict[str, Any] = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    kind = number % 6
    if kind == 0:
        with model.trace(prompt, **sampling) as tracer:
            read = list().save()
            for _ in tracer.iter[:]:
                read.append(model.model.layers[7].mlp.output)
    elif kind == 1:
        with model.trace(prompt, **sampling) as tracer:
            for _ in tracer.iter[:]:
                model.model.layers[7].mlp.output[:] = 0
                model.logits[:] += 1
    elif kind == 2:
        with pytest.raises(RuntimeError):
            with model.trace(prompt, **sampling):
                kept = model.logits.save()
                kept.reshape(7, 7)
    elif kind == 3:
        with model.trace(prompt, **sampling) as tracer:
            tracer.stop()
    elif kind == 4:
        with pytest.raises(Exception, match="has passed"):
            with model.trace(prompt, **sampling):
                model.model.layers[7].mlp.output
                model.model.layers[3].mlp.output
    else:
        vector = torch.randn(576)
        with model.trace(prompt, **sampling):
            lens = model.lm_head(model.model.layers[7].output[0] + vector).save()
            print(number)


def watch_memory(model: Any, count: int, window: int) -> dict[str, float]:
    """Growth in MiB of every process between the first and the last `window` traces, by name."""
    for number in range(30):  # caches fill, the order is learned
        one_trace(model, number)
    watched = [psutil.Process(), *descendants(psutil.Process().pid)]
    held: dict[int, list[float]] = {process.pid: [] for process in watched}
    for number in range(count):
        one_trace(model, number)
        if number < window or number >= count - window:
            if number % 10 == 9:
                for process in watched:
                    held[process.pid].append(resident(process))
    half = window // 10
    return {
        f"{process.name()} {process.pid}": statistics.median(held[process.pid][-half:])
        - statistics.median(held[process.pid][:half])
        for process in watched
    }


@pytest.mark.parametrize(
    ("count", "window"), [(300, 60), pytest.param(2000, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_memory_is_flat_over_many_traces(smollm2: Any, count: int, window: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        growth = watch_memory(smollm2, count, window)
    assert len(growth) >= 3  # client, engine core, worker
    assert all(grown < GROWTH for grown in growth.values()), growth
    smollm2.check_integrity()
    assert not suspended_greenlets()
    assert_serves(smollm2)


def test_a_local_model_has_no_hook_and_no_greenlet_left(local_smollm2: Any) -> None:
    module = local_smollm2._module
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            with local_smollm2.trace(PROMPT, max_tokens=2, temperature=0):
                local_smollm2.model.layers[2].output
                1 / 0
    local_smollm2.check_integrity()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert not suspended_greenlets()


def suspended_greenlets() -> list[greenlet.greenlet]:
    """Greenlets of this process that have begun and not ended, but for the main one of each thread."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) is greenlet.greenlet]
    return [thing for thing in found if thing and thing.parent is not None]


TOP_LEVEL = """\
import sys, psutil
from invivo import VLLM

model = VLLM({path!r}, **{engine!r})
with model.trace([17, 31, 5], max_tokens=2, temperature=0, ignore_eos=True) as tracer:
    logits = model.logits.save()
assert logits.shape == (1, 49152)
print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
{then}
"""

ENDS = {
    "falls off its end": "",
    "exits": "sys.exit(3)",
    "raises": "raise RuntimeError('of the script')",
    "closes": (
        "from support.processes import engine_processes, still_there\n"
        "processes = engine_processes()\n"
        "model.close()\n"
        "assert not still_there(processes)\n"
        "from invivo import EngineClosedError\n"
        "for attempt in (lambda: model.trace([1], max_tokens=1), lambda: model.engine, model.dispatch):\n"
        "    try:\n"
        "        attempt()\n"
        "    except EngineClosedError as error:\n"
        "        assert 'was closed. Make a new `VLLM(...)`' in str(error)\n"
        "    else:\n"
        "        raise AssertionError\n"
        "model.close()"
    ),
}


@pytest.mark.parametrize(
    "end", ["raises", *(pytest.param(end, marks=pytest.mark.slow) for end in ("falls off its end", "exits", "closes"))]
)
def test_a_plain_script_leaves_no_process(tmp_path: Path, end: str) -> None:
    """F5 and F6 too: the first trace starts the engine, at the top level of a script, without an `if __name__`."""
    stdout, stderr = finish(start_script(tmp_path, TOP_LEVEL, then=ENDS[end]), {"exits": 3, "raises": 1}.get(end, 0))
    assert not still_there(named_by(stdout.splitlines()))
    assert "invivo: engine for" in stderr and "ready after" in stderr


@pytest.mark.slow  # the one that is killed while it sends shows the same at a worse moment
def test_a_killed_client_leaves_no_process(tmp_path: Path) -> None:
    assert_killing_leaves_no_process(start_script(tmp_path, TOP_LEVEL, then="sys.stdin.read()"))
