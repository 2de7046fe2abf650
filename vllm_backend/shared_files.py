"""Shared memory of an engine's processes, which has names in ``/dev/shm``.

A process that is killed leaves it behind, and CPU workers that share a model do so in any case.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_NAMES = re.compile(r"vllm_|psm_|.*-cpushm_\d+$")
"""The names that vLLM and Python give; Python removes semaphores when this process ends."""


def processes() -> frozenset[int]:
    """Those below this one."""
    return frozenset(_below(os.getpid()))


def shared_files(others: Collection[int]) -> frozenset[Path]:
    """The files that vLLM's processes below this one share now, but for some processes."""
    found: set[Path] = set()
    for pid in processes() - frozenset(others):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            if any("/vllm/" in line for line in lines):  # its libraries
                files = {Path(line.split(maxsplit=5)[-1]) for line in lines if f"{_FOLDER}/" in line}
                found.update(file for file in files if file.parent == _FOLDER and _NAMES.match(file.name))
    return frozenset(found)


def remove(files: Collection[Path]) -> None:
    """Remove those that are still there, once their processes are gone."""
    for file in files:
        file.unlink(missing_ok=True)


def _below(pid: int) -> Iterator[int]:
    """The processes below a process."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text(encoding="ascii").split()):
                yield child
                yield from _below(child)
