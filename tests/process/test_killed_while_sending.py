"""Killed while 100 MB come home: client or engine, nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import finish, named_by, start_script, still_there

pytestmark = pytest.mark.engine

SCRIPT = """
import gc, os, threading, psutil
from invivo import VLLM, EngineDiedError
from support.processes import engine_processes

model = VLLM({path!r}, **{engine!r}).dispatch()
core, worker = engine_processes()
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
    script = start_script(tmp_path, SCRIPT, who=who)
    written = finish(script, -9 if who == "client" else 0)
    assert not still_there(named_by(written.stdout.splitlines()))
    assert who == "client" or "died as it should" in written.stdout
