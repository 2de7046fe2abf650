"""Engines whose workers are actors of Ray: they serve traces as processes do, and nothing of them stays.

The scripts run in processes of their own, since the platform of a process is one for good: vLLM has no Ray for CPUs,
and `support.ray_cpu` is the CPU with a device to ask Ray for. `tests/contract --topology ray` is the contract there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from process.test_killed_worker import SCRIPT as KILLED
from support.in_ray import NO_RAY, ray_environment, ray_folder
from support.processes import assert_killing_leaves_no_process, finish, start_script

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(NO_RAY is not None, reason=str(NO_RAY)),
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What Ray writes goes here, and with the test; `tmp_path` is too long a name for its sockets."""
    folder = ray_folder()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in ray_environment(folder).items():
        monkeypatch.setenv(name, value)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


START = """\
import os, psutil
from invivo import VLLM
from support.processes import still_there

before = set(os.listdir("/dev/shm"))
settings = {engine!r} | {{"distributed_executor_backend": "ray", {split!r}: 2}}
model = VLLM({path!r}, mode={mode!r}, **settings)
"""

SERVES = """
with model.trace([1, 2, 3], max_tokens=3, temperature=0, ignore_eos=True) as tracer:
    wide = [model.model.layers[2].mlp.act_fn.output for _ in tracer.iter[:]].save()
    words = [hash("x")].save()
assert [list(one.shape) for one in wide] == [[3, 192], [1, 192], [1, 192]]
assert words == [-3368204716105132637]  # with PYTHONHASHSEED=0: sets have one order in all workers
with model.trace([1, 2, 3], max_tokens=1, temperature=0) as tracer:
    model.model.layers[1].mlp.act_fn.output[:] = 0
    nothing = model.model.layers[1].mlp.output.save()
    large = model.logits.expand(20, -1).clone().save()
assert not nothing.any() and list(large.shape) == [20, 49152]
model.check_integrity()
processes = psutil.Process().children(recursive=True)
assert sum("RayWorkerProc" in process.name() for process in processes) == 2, [one.name() for one in processes]
model.close()
trackers = [one for one in psutil.Process().children() if "resource_tracker" in " ".join(one.cmdline())]
left = [one for one in still_there([one for one in processes if one not in trackers], 60)]
assert not left, [one.cmdline() for one in left]
assert not set(os.listdir("/dev/shm")) - before, set(os.listdir("/dev/shm")) - before
"""


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_traces_and_the_end(tmp_path: Path, split: str) -> None:
    finish(start_script(tmp_path, START + SERVES, split=split, mode="sync"), seconds=500)


WAITS = """
import sys
from pathlib import Path
from invivo.vllm_backend.shared_files import shared_files
with model.trace([1, 2, 3], max_tokens=1):
    hidden = model.model.layers[1].mlp.output.save()
Path({names!r}).write_text("\\n".join(map(str, shared_files(()))))
print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_nothing(tmp_path: Path) -> None:
    names = tmp_path / "shared"
    source = START + WAITS
    script = start_script(tmp_path, source, split="tensor_parallel_size", mode="sync", names=str(names))
    assert_killing_leaves_no_process(script)
    shared = names.read_text().split("\n")
    assert len(shared) > 2 and not [name for name in shared if Path(name).exists()]


@pytest.mark.parametrize(("split", "mode", "victim"), [("tensor_parallel_size", "sync", 1)])
def test_a_worker_killed_in_the_middle_of_a_trace(tmp_path: Path, split: str, mode: str, victim: int) -> None:
    workers = {split: 2, "distributed_executor_backend": "ray"}
    script = start_script(tmp_path, KILLED, victim=victim, mode=mode, workers=workers)
    written, errors = script.communicate(timeout=500)  # it starts two engines
    assert "all is well" in written, errors[-1500:]
