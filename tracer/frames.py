"""The only code that touches the caller's frame: skipping the body of a `with`, and binding names afterwards.

Python has no way to *not* run the body of a `with`. What it has is hooks before each instruction that may raise:
`Skipper` makes the single frame that holds the `with` raise `SkipBody` where the body starts, and `__exit__` swallows
it. The place is an instruction, not a line, so a `with` on one line works as well.

On Python 3.12 and later the hook is one of `sys.monitoring`. On 3.11 it is a trace function, and when that raises,
CPython switches tracing off altogether: whoever was tracing before (a debugger, coverage) would be blind from then on.
`Skipper.skipped` gives the frame and the thread back as they were.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from .monitoring import forget, leave

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import FrameType

    from .capture import Site

_OPTIMIZED = 0x1  # inspect.CO_OPTIMIZED: a function, whose locals are not a dict


class SkipBody(BaseException):
    """Leaves the body of a captured `with` before its first instruction; never seen outside of `__exit__`."""


class Skipper:
    """Leaves one body, once.

    `arm` must be the last thing that `__enter__` does, and `skipped` the first that `__exit__` does, whatever
    exception it is given.

    Args:
        frame: the frame that holds the `with`.
        site: where in it, as found by `capture.locate` for this very frame.
        value: what `__enter__` returns. Python can store it after `as` by itself, but for bodies that start with
            `try` or do nothing (`Site.binds`): there `skipped` does.
    """

    def __init__(self, frame: FrameType, site: Site, value: object) -> None:
        self._frame: FrameType | None = frame
        self._site = site
        self._value = value
        self._traced = False
        self._thread: Any = None
        self._local: Any = None
        self._opcodes = False

    def arm(self) -> None:
        """Makes the frame raise `SkipBody` at the first instruction of the body."""
        frame = self._frame
        assert frame is not None, "a Skipper is for one use"
        self._local = frame.f_trace
        if leave(frame, self._site.enter, self._site.start, SkipBody):
            frame.f_trace = None  # a debugger need not stop at SkipBody
            return
        self._traced = True
        self._thread = sys.gettrace()
        self._opcodes = frame.f_trace_opcodes
        if _counts_calls(self._thread):
            for inner in _frames_above(frame, sys._getframe()):
                if inner.f_trace is None:  # it saw the call, so it must see the return as well
                    inner.f_trace = self._thread
        frame.f_trace_opcodes = True
        frame.f_trace = self._trace
        sys.settrace(self._trace)

    def skipped(self, error: BaseException | None) -> FrameType | None:
        """Puts back what `arm` found, and says whether the body was skipped.

        Args:
            error: what `__exit__` is given.

        Returns:
            The frame that holds the `with`; None if another exception left the body, which has to go on.
        """
        frame, self._frame = self._frame, None
        assert frame is not None, "a Skipper is for one use"
        self._disarm(frame)
        if error is None:
            return frame
        if not isinstance(error, SkipBody):
            return None
        error.__traceback__ = None
        return frame

    def _disarm(self, frame: FrameType) -> None:
        value, self._value = self._value, None
        local, self._local = self._local, None
        if not self._traced:
            forget()
            self._bind(frame, value)
            frame.f_trace = local
            return
        thread, self._thread = self._thread, None
        sys.settrace(None)
        self._bind(frame, value)
        frame.f_trace = local
        frame.f_trace_opcodes = self._opcodes
        sys.settrace(thread)
        if _counts_calls(thread):
            for inner in _frames_above(frame, sys._getframe()):  # it will see the returns: show it the calls
                thread(inner, "call", None)

    def _bind(self, frame: FrameType, value: object) -> None:
        """Stores the value for `as` where Python did not get to it."""
        if self._site.binds and self._site.tracer is not None:
            bind(frame, {self._site.tracer: value}, self._site.global_names)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        """The trace function while armed, on Python 3.11."""
        if frame is not self._frame:
            return None
        if event == "opcode" and not self._site.enter <= frame.f_lasti < self._site.start:
            raise SkipBody
        return self._trace


def bind(frame: FrameType, values: Mapping[str, object], global_names: Collection[str]) -> None:
    """Binds names in the scope of `frame`, as if the code there had assigned them.

    Args:
        frame: frame of a module, class body or function that is still running.
        values: what to bind.
        global_names: those of the names that the scope takes from its globals.
    """
    own: dict[str, object] = {}
    for name, value in values.items():
        if name in global_names:
            frame.f_globals[name] = value
        else:
            own[name] = value
    if not own:
        return
    scope = frame.f_locals
    for name, value in own.items():
        scope[name] = value
    if sys.version_info < (3, 13) and frame.f_code.co_flags & _OPTIMIZED:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        release(frame, scope)


def release(frame: FrameType, scope: Mapping[str, object]) -> None:
    """Empties the snapshot that reading `frame.f_locals` leaves in a function's frame before Python 3.13.

    The snapshot would keep every local alive until the function returns, a deleted tensor too. It is left alone where
    somebody else holds it (the caller called `locals()`).
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & _OPTIMIZED:
        return
    if sys.getrefcount(scope) > 4:  # the frame, our caller's variable, our parameter, getrefcount's
        return
    code = frame.f_code
    for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        scope.pop(name, None)  # type: ignore[attr-defined]


def _counts_calls(thread: Any) -> bool:
    """Whether the trace function pairs the calls and returns of all frames: coverage's tracer in C.

    A trace function in Python is told of a frame's return through that frame's `f_trace`, so calls and returns pair by
    themselves. coverage's tracer installs itself below that, for all frames, and keeps a stack of them.
    """
    kind = type(thread)
    return kind.__name__ == "CTracer" and kind.__module__.partition(".")[0] == "coverage"


def _frames_above(frame: FrameType, innermost: FrameType) -> list[FrameType]:
    """The frames called from `frame`, the outermost first, up to `innermost`."""
    inner: list[FrameType] = []
    walk: FrameType | None = innermost
    while walk is not None and walk is not frame:
        inner.append(walk)
        walk = walk.f_back
    inner.reverse()
    return inner if walk is frame else []
