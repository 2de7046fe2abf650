"""An engine that is killed in the middle of a trace: a typed error at once, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import ENGINE
from support.processes import start_script

pytestmark = pytest.mark.engine

SCRIPT = """
import threading, traceback
import psutil
from invivo import VLLM, EngineDiedError

model = VLLM({path!r}, **{engine!r}).dispatch()
before = psutil.Process().children(recursive=True)
core = next(process for process in psutil.Process().children() if process.children())
victim = {{"core": core, "worker": core.children()[0]}}[{who!r}]
threading.Timer(1, victim.kill).start()
try:
    with model.trace([1, 2, 3], max_tokens=120, ignore_eos=True) as tracer:
        import time
        for step in tracer.iter[:]:
            time.sleep(0.1)
except EngineDiedError as error:
    assert "Make a new `VLLM(...)`" in str(error)
    assert "SkipBody" not in "".join(traceback.format_exception(error))
else:
    raise AssertionError("it was not killed")
for attempt in range(2):
    try:
        with model.trace([1, 2, 3], max_tokens=1):
            pass
    except EngineDiedError:
        continue
    raise AssertionError("a dead engine answered")
model.close()
_, alive = psutil.wait_procs([core, *before], timeout=30)
alive = [process for process in alive if "resource_tracker" not in " ".join(process.cmdline())]
assert not alive, alive
print("all is well")
"""


@pytest.mark.parametrize("who", ["core", pytest.param("worker", marks=pytest.mark.slow)])
def test_an_engine_killed_in_the_middle_of_a_trace(tmp_path: Path, who: str) -> None:
    path = str(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    source = SCRIPT.format(path=path, engine=ENGINE | {"max_model_len": 128}, who=who)
    script = start_script(tmp_path / "killed.py", source)
    stdout, stderr = script.communicate(timeout=200)
    assert script.returncode == 0, stderr[-4000:]
    assert "all is well" in stdout
