"""How much memory this process holds and how much there is, as Linux tells it."""

from __future__ import annotations

import ctypes
import gc
import os

_PAGE = os.sysconf("SC_PAGE_SIZE")
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Memory:
    """What this process holds and what is left.

    The files are kept open: a block may open so many that no other one can be.
    """

    def __init__(self) -> None:
        self._statm = _opened("/proc/self/statm")
        self._meminfo = _opened("/proc/meminfo")
        self._groups = [(_opened(limit), _opened(used)) for limit, used in _GROUPS if os.path.exists(limit)]

    @staticmethod
    def known() -> bool:
        """Whether the system tells."""
        return os.path.exists("/proc/self/statm")

    def resident(self) -> int:
        """Bytes of memory that this process holds."""
        return int(_read(self._statm).split()[1]) * _PAGE

    def available(self) -> int:
        """Bytes that processes here can still have: the machine's, or those of the container if that has fewer."""
        (line,) = [line for line in _read(self._meminfo).splitlines() if line.startswith(b"MemAvailable:")]
        found = int(line.split()[1]) * 1024
        for limit, used in self._groups:
            if (most := _read(limit).strip()) != b"max":
                found = min(found, max(int(most) - int(_read(used)), 0))
        return found


def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _read(file: int) -> bytes:
    return os.pread(file, 1 << 14, 0)


def give_back() -> None:
    """Have the memory of objects that are gone go back to the system, which the C library may keep for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only
    if trim is not None:
        trim(0)


def shown(size: float) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
