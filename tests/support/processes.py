"""Processes seen from outside: scripts that start engines, who is there, how much memory they hold, who has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import ENGINE

TESTS = Path(__file__).parents[1]


def start_script(folder: Path, source: str, **values: object) -> subprocess.Popen[str]:
    """Run a plain script that makes a model; its output is piped.

    Args:
        folder: where to put it.
        source: for `str.format`, with `{path!r}` for a tiny checkpoint and `{engine!r}` for engine arguments. It may
            import from `support`.
        values: what else to fill in.
    """
    path = tiny_checkpoint("llama", tokenizer=smollm2_path())
    script = folder / "script.py"
    script.write_text(source.format(path=str(path), engine=ENGINE | {"max_model_len": 128}, **values))
    imports = [str(TESTS), str(TESTS.parent / "scripts"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, imports)),
            "OMP_NUM_THREADS": "1",  # more are slower on a model this small, and by far where others use the cores
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    )


class Written(NamedTuple):
    """What a script has written."""

    stdout: str
    stderr: str


def finish(script: subprocess.Popen[str], code: int = 0, seconds: float = 200) -> Written:
    """Wait for the end of a script, and assert its exit code."""
    written = Written(*script.communicate(timeout=seconds))
    assert script.returncode == code, written.stderr[-4000:]
    return written


def named_by(lines: Iterable[str]) -> list[psutil.Process]:
    """The processes, at least two, that the first line of process ids names; without those that have gone already."""
    pids = next(line.split() for line in lines if line.replace(" ", "").strip().isdigit())
    assert len(pids) >= 2, pids
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(int(pid)))
        except psutil.NoSuchProcess:
            continue
    return found


def assert_killing_leaves_no_process(script: subprocess.Popen[str]) -> None:
    """Kill a script that has named the processes below it, or is about to; all of them end."""
    with script:
        assert script.stdout is not None
        processes = named_by(script.stdout)
        script.kill()
        script.wait()
        assert not still_there(processes)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`."""
    return psutil.Process(pid).children(recursive=True)


def engine_processes() -> list[psutil.Process]:
    """The processes of this process's engine, for use in scripts: its core, then its worker."""
    (core,) = [process for process in psutil.Process().children() if process.children()]
    return [core, *core.children(recursive=True)]


def shared_by(processes: list[psutil.Process]) -> set[str]:
    """Names in ``/dev/shm`` of the memory that processes share; other engines of the machine have others."""
    lines = [line for one in processes for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines()]
    paths = [Path(line.split(maxsplit=5)[-1]) for line in lines if " /dev/shm/" in line]
    return {path.name for path in paths if not path.name.endswith("(deleted)")}


def still_there(processes: list[psutil.Process], timeout: float = 60) -> list[psutil.Process]:
    """Those that have not ended within the time; waits until all have."""
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def resident(process: psutil.Process) -> float:
    """Resident memory of a process in MiB, without pages shared with others."""
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 2**20
