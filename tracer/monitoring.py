"""Leaving a body on Python 3.12 and later, by `sys.monitoring`.

There, switching trace functions on and off instruments all running code anew, which is slow, and not safe while other
threads do the same. A monitoring tool of our own watches nothing but the instructions after those that enter a `with`,
in the functions that hold a trace, and needs no trace function: whatever debugger or coverage is there stays there.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import CodeType, FrameType
from typing import Any

from .instructions import leaving_points

_NAME = "invivo"
_FREE_IDS = (3, 4)  # those that Python has not given a purpose

_monitoring: Any = getattr(sys, "monitoring", None)  # None on Python 3.11
_lock = threading.Lock()
_watched: dict[int, tuple[weakref.ref[CodeType], frozenset[int]]] = {}


class _Armed(threading.local):
    """What to leave in this thread."""

    frame: FrameType | None = None
    enter: int = 0
    start: int = 0
    exception: type[BaseException] = BaseException


_armed = _Armed()


def leave(frame: FrameType, enter: int, start: int, exception: type[BaseException]) -> bool:
    """Makes `frame` raise `exception` at the first instruction that is not from `enter` up to `start`.

    Returns:
        False where it cannot be done: Python 3.11, or all tools are taken.
    """
    if _monitoring is None:
        return False
    code = frame.f_code
    known = _watched.get(id(code))
    if known is None or known[0]() is not code:
        with _lock:
            tool = _tool()
            if tool is None:
                return False
            for key in [key for key, (alive, _) in _watched.items() if alive() is None]:
                del _watched[key]
            points = leaving_points(code)
            _monitoring.set_local_events(tool, code, _monitoring.events.INSTRUCTION)
            _watched[id(code)] = (weakref.ref(code), points)
    _armed.frame, _armed.enter, _armed.start, _armed.exception = frame, enter, start, exception
    return True


def forget() -> None:
    """Disarms this thread."""
    _armed.frame = None


def _tool() -> int | None:
    """Our tool, registered at the first use; None if all are taken."""
    for tool in _FREE_IDS:
        if _monitoring.get_tool(tool) == _NAME:
            return tool
    for tool in _FREE_IDS:
        if _monitoring.get_tool(tool) is None:
            _monitoring.use_tool_id(tool, _NAME)
            _monitoring.register_callback(tool, _monitoring.events.INSTRUCTION, _instruction)
            return tool
    return None


def _instruction(code: CodeType, offset: int) -> object:
    """Called before instructions of watched code; asks not to be called again where no body is ever left."""
    frame = _armed.frame
    if frame is not None and frame.f_code is code and sys._getframe(1) is frame:
        if not _armed.enter <= offset < _armed.start:
            _armed.frame = None
            raise _armed.exception
        return None
    known = _watched.get(id(code))
    if known is None or known[0]() is not code or offset in known[1]:
        return None
    return _monitoring.DISABLE
