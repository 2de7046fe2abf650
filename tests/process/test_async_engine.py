"""Asynchronous engines and their processes: a killed client, a killed engine, and a client that ends in any way."""

from __future__ import annotations

from pathlib import Path

import pytest

from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import ENGINE
from support.processes import processes_named, start_script, still_there

pytestmark = pytest.mark.engine

START = """\
import asyncio, sys, threading, time, traceback
import psutil
from invivo import VLLM, EngineClosedError, EngineDiedError

model = VLLM({path!r}, mode="async", **{engine!r})


def endless():
    with model.trace([1, 2, 3], max_tokens=120, ignore_eos=True) as tracer:
        import time
        for step in tracer.iter[:]:
            token = model.samples.save(stream=True)
            time.sleep(0.1)
    return tracer

"""

KILLED_CLIENT = """
async def main():
    async for output in endless().backend:
        if len(output.outputs[0].token_ids) == 3:
            print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)

asyncio.run(main())
"""

KILLED_ENGINE = """
model.dispatch()
before = psutil.Process().children(recursive=True)
core = next(process for process in psutil.Process().children() if process.children())
victim = {{"core": core, "worker": core.children()[0]}}[{who!r}]


async def take(tracer):
    try:
        async for output in tracer.backend:
            pass
    except EngineDiedError as error:
        assert "Make a new `VLLM(...)`" in str(error)
        return time.monotonic()
    raise AssertionError("it was not killed")


async def main():
    tracers = [endless() for _ in range(3)]
    tasks = [asyncio.ensure_future(take(tracer)) for tracer in tracers]
    await asyncio.sleep(1)
    victim.kill()
    began = time.monotonic()
    ends = await asyncio.gather(*tasks)
    assert max(ends) - began < 15, ends
    await take(endless())
    try:
        model.check_integrity()
    except EngineDiedError:
        pass
    else:
        raise AssertionError("a dead engine answered")
    model.close()

asyncio.run(main())
_, alive = psutil.wait_procs([core, *before], timeout=30)
alive = [process for process in alive if "resource_tracker" not in " ".join(process.cmdline())]
assert not alive, alive
print("all is well")
"""

ENDS = """
async def main():
    tracer = endless()
    async for output in tracer.backend:
        break
    never_taken = endless()
    in_flight = endless()
    task = asyncio.ensure_future(in_flight.backend.collect())
    await asyncio.sleep(0.5)
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    {then}

asyncio.run(main())
"""


def script_of(tmp_path: Path, source: str, **values: object) -> str:
    path = str(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    return (START + source).format(path=path, engine=ENGINE | {"max_model_len": 128}, **values)


def test_a_killed_client_leaves_no_process(tmp_path: Path) -> None:
    with start_script(tmp_path / "killed.py", script_of(tmp_path, KILLED_CLIENT)) as script:
        assert script.stdout is not None
        line = next(line for line in script.stdout if line.strip() and line.replace(" ", "").strip().isdigit())
        processes = processes_named(line)
        assert len(processes) >= 2
        script.kill()
        script.wait()
        assert not still_there(processes)


@pytest.mark.parametrize("who", ["core", pytest.param("worker", marks=pytest.mark.slow)])
def test_an_engine_killed_while_outputs_come(tmp_path: Path, who: str) -> None:
    script = start_script(tmp_path / "killed.py", script_of(tmp_path, KILLED_ENGINE, who=who))
    stdout, stderr = script.communicate(timeout=200)
    assert script.returncode == 0, stderr[-4000:]
    assert "all is well" in stdout


@pytest.mark.parametrize(
    "then",
    [
        "pass",
        pytest.param("sys.exit(3)", marks=pytest.mark.slow),
        pytest.param("model.close(); task.cancel()", marks=pytest.mark.slow),
    ],
)
def test_a_client_that_ends_leaves_no_process(tmp_path: Path, then: str) -> None:
    script = start_script(tmp_path / "ends.py", script_of(tmp_path, ENDS, then=then))
    stdout, stderr = script.communicate(timeout=200)
    assert script.returncode == (3 if "exit" in then else 0), stderr[-4000:]
    (line,) = [line for line in stdout.splitlines() if line and line.replace(" ", "").isdigit()]
    assert len(line.split()) >= 2
    assert not still_there(processes_named(line))
    assert "Traceback" not in stderr.partition("ready after")[2], stderr[-4000:]
