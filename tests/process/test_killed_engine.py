"""An engine that is killed in the middle of a trace: a typed error at once, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import finish, start_script

pytestmark = pytest.mark.engine

SCRIPT = """
import threading, traceback
from invivo import VLLM, EngineDiedError
from support.processes import engine_processes, still_there

model = VLLM({path!r}, **{engine!r}).dispatch()
processes = engine_processes()
threading.Timer(1, processes[{victim}].kill).start()
try:
    with model.trace([1, 2, 3], max_tokens={steps}, ignore_eos=True) as tracer:
        import time
        for step in tracer.iter[:]:
            time.sleep(0.1)
        time.sleep(20)  # in the call that collects what was saved
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
assert not still_there(processes)
print("all is well")
"""


@pytest.mark.parametrize(
    ("victim", "steps"),
    [
        pytest.param(0, 120, id="core"),
        pytest.param(1, 120, id="worker", marks=pytest.mark.slow),
        pytest.param(0, 1, id="core, collecting", marks=pytest.mark.slow),
        pytest.param(1, 1, id="worker, collecting", marks=pytest.mark.slow),
    ],
)
def test_an_engine_killed_in_the_middle_of_a_trace(tmp_path: Path, victim: int, steps: int) -> None:
    assert "all is well" in finish(start_script(tmp_path, SCRIPT, victim=victim, steps=steps)).stdout
