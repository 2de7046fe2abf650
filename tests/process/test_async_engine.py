"""Asynchronous engines and their processes: a killed client, a killed engine, and a client that ends in any way."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import assert_killing_leaves_no_process, finish, named_by, start_script, still_there

pytestmark = pytest.mark.engine

START = """\
import asyncio, sys, time
import psutil
from invivo import VLLM, EngineDiedError
from support.processes import engine_processes, still_there

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
processes = engine_processes()
victim = processes[{victim}]


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
assert not still_there(processes)
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


def test_a_killed_client_leaves_no_process(tmp_path: Path) -> None:
    assert_killing_leaves_no_process(start_script(tmp_path, START + KILLED_CLIENT))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["core", "worker"])
def test_an_engine_killed_while_outputs_come(tmp_path: Path, victim: int) -> None:
    assert "all is well" in finish(start_script(tmp_path, START + KILLED_ENGINE, victim=victim)).stdout


@pytest.mark.parametrize(
    "then",
    [
        "pass",
        pytest.param("sys.exit(3)", marks=pytest.mark.slow),
        pytest.param("model.close(); task.cancel()", marks=pytest.mark.slow),
    ],
)
def test_a_client_that_ends_leaves_no_process(tmp_path: Path, then: str) -> None:
    script = start_script(tmp_path, START + ENDS, then=then)
    stdout, stderr = finish(script, 3 if "exit" in then else 0)
    assert not still_there(named_by(stdout.splitlines()))
    assert "Traceback" not in stderr.partition("ready after")[2], stderr[-4000:]
