"""Killed while 100 MB come home: client or engine, nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import ENGINE
from support.processes import processes_named, start_script, still_there

pytestmark = pytest.mark.engine

SCRIPT = """
import gc, os, sys, threading, psutil
from invivo import VLLM, EngineDiedError

model = VLLM({path!r}, **{engine!r}).dispatch()
core = next(process for process in psutil.Process().children() if process.children())
worker = core.children()[0]
print(core.pid, worker.pid, flush=True)


def holds(pid):
    links = []
    for fd in os.listdir(f"/proc/{{pid}}/fd"):
        try:
            links.append(os.readlink(f"/proc/{{pid}}/fd/{{fd}}"))
        except OSError:
            pass
    return any("invivo-saves" in link for link in links)


def kill():
    while not holds(worker.pid):
        pass
    victim = {{"client": psutil.Process(), "engine": core}}[{who!r}]
    victim.kill()


for _ in range(2):
    with model.trace([1, 2, 3], max_tokens=1):
        import torch
        saved = torch.ones(25 << 20).save()
assert float(saved.sum()) == 25 << 20
while holds(worker.pid):
    pass
threading.Thread(target=kill, daemon=True).start()
try:
    while True:
        with model.trace([1, 2, 3], max_tokens=1):
            import torch
            saved = torch.ones(25 << 20).save()
except EngineDiedError as error:
    print("died as it should", flush=True)
del saved
gc.collect()
with open("/proc/self/maps") as maps:
    assert "invivo-saves" not in maps.read()
assert not holds(os.getpid())
model.close()
"""


@pytest.mark.parametrize("who", ["client", pytest.param("engine", marks=pytest.mark.slow)])
def test_killed_while_saves_are_copied(tmp_path: Path, who: str) -> None:
    path = str(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    source = SCRIPT.format(path=path, engine=ENGINE | {"max_model_len": 128}, who=who)
    script = start_script(tmp_path / "killed.py", source)
    stdout, stderr = script.communicate(timeout=200)
    (line,) = [line for line in stdout.splitlines() if line and line.replace(" ", "").isdigit()]
    assert not still_there(processes_named(line))
    if who == "client":
        assert script.returncode == -9, stderr[-4000:]
    else:
        assert "died as it should" in stdout, stderr[-4000:]
        assert script.returncode == 0, stderr[-4000:]
