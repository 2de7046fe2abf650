"""One of several workers is killed in the middle of a trace: everybody hears of it soon, and nothing of it stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from support.processes import start_script

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]  # each starts two engines

SCRIPT = """
import os, threading, time
import asyncio
from invivo import VLLM, EngineDiedError
from support.processes import engine_processes, shared_by, still_there

settings = {engine!r} | {workers!r}
model = VLLM({path!r}, mode={mode!r}, **settings)
model.dispatch()
processes = engine_processes()
shared = set()
workers = sorted((p for p in processes[1:] if p.memory_info().rss > 2e8), key=lambda p: p.pid)
assert len(workers) == 2, workers
killed = []

def kill():
    shared.update(shared_by(processes))
    killed.append(time.monotonic())
    workers[{victim}].kill()

threading.Timer(2, kill).start()
errors = []

def blocks():
    with model.trace([1, 2, 3], max_tokens=120, ignore_eos=True) as tracer:
        import time
        for step in tracer.iter[:]:
            hidden = model.model.layers[1].mlp.act_fn.output
            time.sleep(0.1)
    return tracer

async def wait(tracer):
    try:
        await tracer.backend.collect()
    except EngineDiedError as error:
        errors.append(error)

async def all_of_them():
    await asyncio.gather(*[wait(blocks()) for _ in range(3)])

if {mode!r} == "sync":
    try:
        blocks()
    except EngineDiedError as error:
        errors.append(error)
    assert len(errors) == 1
else:
    asyncio.run(all_of_them())
    assert len(errors) == 3
assert killed and time.monotonic() - killed[0] < 30, time.monotonic() - killed[0]
assert all("Make a new `VLLM(...)`" in str(error) for error in errors)
model.close()
assert not still_there(processes, 30), [p.cmdline() for p in still_there(processes, 1)]
assert shared
there = shared & {{*os.listdir("/dev/shm")}}
semaphores = {{name for name in there if name.startswith("sem.mp-")}}  # go when this process does
left = there - semaphores
assert not left, left
with VLLM({path!r}, **settings) as model:
    with model.trace([1, 2, 3], max_tokens=1):
        hidden = model.model.layers[1].mlp.act_fn.output.save()
assert hidden.shape == (3, 192)
print("semaphores", *semaphores)
print("all is well")
"""


@pytest.mark.parametrize(
    ("workers", "mode", "victim"),
    [
        ("tensor_parallel_size", "sync", 0),
        ("tensor_parallel_size", "async", 1),
        ("pipeline_parallel_size", "sync", 1),
        ("pipeline_parallel_size", "async", 0),
    ],
)
def test_a_worker_killed_in_the_middle_of_a_trace(tmp_path: Path, workers: str, mode: str, victim: int) -> None:
    script = start_script(tmp_path, SCRIPT, victim=victim, mode=mode, workers={workers: 2})
    written, errors = script.communicate(timeout=500)
    assert "all is well" in written, errors[-1500:]
    (semaphores,) = [line.split()[1:] for line in written.splitlines() if line.startswith("semaphores")]
    latest = time.monotonic() + 10
    while left := set(semaphores) & set(os.listdir("/dev/shm")):
        assert time.monotonic() < latest, left
        time.sleep(0.1)
