"""What a block may use of the machine: the numbers, and how they are checked."""

from __future__ import annotations

import msgspec

from ..envoy.errors import MisuseError, UnsupportedError
from .memory import Memory


class Limits(msgspec.Struct, frozen=True):
    """The limits of one block; None is no limit.

    Attributes:
        time: seconds that one turn may take, from being resumed to asking for the next port.
        memory: what one turn may add to the process's resident memory: bytes, or below 1 a share of the memory that
            is available when the turn begins. The block may hold as much on a GPU.
        saves: bytes of all that one trace saves.
    """

    time: float | None = None
    memory: float | None = None
    saves: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is one at all."""
        return self != Limits()


def limits(time_limit: object, memory_limit: object, save_limit: object) -> Limits:
    """The limits that a user asked for, checked.

    Raises:
        MisuseError: one that is no positive number.
        UnsupportedError: a memory limit, on a system that does not tell a process's memory.
    """
    if memory_limit is not None and not Memory.known():
        raise UnsupportedError("`memory_limit` needs Linux: this system has no /proc/self/statm to read memory from.")
    time = _number("time_limit", time_limit, "seconds")
    memory = _number("memory_limit", memory_limit, "bytes, or a share of the available memory such as 0.5")
    saves = _number("save_limit", save_limit, "bytes")
    return Limits(time, memory, None if saves is None else int(saves))


def _number(name: str, value: object, unit: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**62:
        raise MisuseError(f"`{name}={value!r}`: a positive number ({unit}) is due, or None for no limit.")
    return value
