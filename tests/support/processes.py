"""Looking at processes from outside: who is there, how much memory they hold, whether they are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`."""
    return psutil.Process(pid).children(recursive=True)


def still_there(processes: list[psutil.Process], timeout: float = 60) -> list[psutil.Process]:
    """Those that have not ended within the time; waits until all have."""
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def resident(process: psutil.Process) -> float:
    """Resident memory of a process in MiB, without pages shared with others."""
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 2**20


def start_script(path: Path, source: str) -> subprocess.Popen[str]:
    """Run a plain script; its output is piped."""
    path.write_text(source)
    return subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def processes_named(pids: str) -> list[psutil.Process]:
    """The processes of a line of process ids; those that have gone already are left out."""
    found = []
    for pid in pids.split():
        try:
            found.append(psutil.Process(int(pid)))
        except psutil.NoSuchProcess:
            continue
    return found
