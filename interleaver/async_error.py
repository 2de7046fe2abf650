"""The ways in which Python raises an exception in a thread that is running something else.

`raise_in` makes a thread raise at the next place where the interpreter looks, which is at every call and every turn of
a loop. A thread that sleeps, or waits in the system, gets there only afterwards; but the main thread can be woken by a
signal, whose handler raises.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Kind = type[BaseException]

_set = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
_set_quietly = ctypes.PYFUNCTYPE(None, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)

SIGNAL = getattr(signal, "SIGRTMAX", None)
"""A signal that nothing else uses: the last of those that have no meaning of their own."""


def raise_in(thread: int, kind: _Kind) -> None:
    """Have a thread raise an exception of this type, as soon as it runs Python."""
    _set(thread, kind)


class _TakenBack(BaseException):
    """Takes the place of an exception that is still to come."""


def take_back() -> None:
    """Have the current thread not raise what `raise_in` asked for, if it has not yet.

    It raises something else instead, here. To ask for nothing (a null pointer) would leave the interpreter's flag up
    that says that something is to be raised; CPython 3.11 then never leaves the first call under a trace function.
    """
    try:
        _set(threading.get_ident(), _TakenBack)
        while True:
            pass
    except _TakenBack:
        return


def again_when_caught(thread: int, kind: _Kind) -> Any:
    """An `__init__` for `kind`: an exception that is raised and caught is raised anew right behind.

    It is all C, since the new one would be raised in the first piece of Python that runs.
    """
    return staticmethod(functools.partial(_set_quietly, thread, kind))


class Waker:
    """Runs a function in the main thread, out of whatever that waits for.

    Args:
        wake: what to run, in the middle of what the thread runs; what it raises is raised there.

    The signal gets its handler once and for good, if it has none.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def prepare(self) -> None:
        """Called in a thread before it may have to be woken."""
        if (
            SIGNAL is not None
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(SIGNAL) is signal.SIG_DFL
        ):
            signal.signal(SIGNAL, self._handle)

    def try_wake(self, thread: int) -> bool:
        """Wake a thread; False if that cannot be done."""
        if SIGNAL is None or thread != threading.main_thread().ident or signal.getsignal(SIGNAL) != self._handle:
            return False
        signal.pthread_kill(thread, SIGNAL)
        return True

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._wake()
