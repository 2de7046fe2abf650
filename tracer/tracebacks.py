"""Tracebacks as data, and back.

A traceback that Python itself can print needs frames, and frames need code that runs. `make_traceback`
compiles, for each line, a code object that bears the file name, function name and position of the original
and does nothing but raise; runs it; and chains the frames that this leaves. Everything that prints tracebacks
(Python, pytest, IPython, debuggers) then finds the user's file, line, function and columns where it expects
them.
"""

from __future__ import annotations

import _thread
import ast
import itertools
import linecache
import os
from functools import lru_cache
from types import CodeType, FunctionType, TracebackType
from typing import TYPE_CHECKING

import msgspec

from ..envoy.envoy import output_item
from .saves import save_method

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST = 200
_LAST_LINE = 2**30
_LAST_REMEMBERED = 100_000
_STOP = "__invivo_stop__"

_STAND_INS = frozenset({output_item.__code__, save_method.__code__})
"""What the body of a block calls where the user wrote something else (`program`)."""


class FrameLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of a traceback.

    Attributes:
        filename: the code's file name.
        lineno: the line, counted from 1.
        name: the function's name.
        line: the line's text, if it was at hand; what is shown is the reader's own file if there is one.
        end_lineno: last line of the expression at fault, if known.
        colno: first column of the expression (counted in bytes of UTF-8, as everywhere in code objects), if
            known.
        end_colno: column after the expression, if known.
        first: the line where the function starts, if known; tools that show a function's source up to the
            error use it.
    """

    filename: str
    lineno: int
    name: str
    line: str = ""
    end_lineno: int | None = None
    colno: int | None = None
    end_colno: int | None = None
    first: int | None = None


def frame_lines(
    traceback: TracebackType | None, keep: Callable[[str], bool], *, everywhere: bool
) -> tuple[FrameLine, ...]:
    """Reads a traceback, outermost frame first.

    Args:
        traceback: the traceback of an exception.
        keep: whether frames of a module, by name, are of interest. Leading frames that are not are dropped.
        everywhere: drop them in other places, too.

    Returns:
        The lines; all of them if none is of interest. Of very long tracebacks the middle is left out, and so are
        calls that stand for what the user wrote, with what they call of no interest.
    """
    entries: list[tuple[TracebackType, bool]] = []
    in_stand_in = False
    while traceback is not None:
        wanted = keep(str(traceback.tb_frame.f_globals.get("__name__", "")))
        in_stand_in = (in_stand_in and not wanted) or traceback.tb_frame.f_code in _STAND_INS
        if not in_stand_in:
            entries.append((traceback, wanted))
        traceback = traceback.tb_next
    first = next((index for index, (_, wanted) in enumerate(entries) if wanted), 0)
    chosen = [entry for entry, wanted in entries[first:] if wanted or not everywhere]
    chosen = chosen or [entry for entry, _ in entries]
    if len(chosen) > _MOST:
        chosen = chosen[: _MOST // 2] + chosen[-_MOST // 2 :]
    return tuple(map(_frame_line, chosen))


def _frame_line(entry: TracebackType) -> FrameLine:
    code, lineno = entry.tb_frame.f_code, entry.tb_lineno or entry.tb_frame.f_code.co_firstlineno
    end_lineno = colno = end_colno = None
    position = next(itertools.islice(code.co_positions(), max(entry.tb_lasti, 0) // 2, None), None)
    if position is not None and position[0] == lineno:
        _, end_lineno, colno, end_colno = position
    line = linecache.getline(code.co_filename, lineno, entry.tb_frame.f_globals).rstrip()
    first = code.co_firstlineno
    filename, name, line = (valid(text) for text in (code.co_filename, code.co_name, line))
    return FrameLine(filename, lineno, name, line, end_lineno, colno, end_colno, first)


def valid(text: str) -> str:
    """Text that can be sent: halves of surrogate pairs, which no UTF-8 has, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def make_traceback(lines: Sequence[FrameLine]) -> TracebackType | None:
    """A traceback that shows `lines`; lines that no code object can have are left out.

    The code runs on a bare thread: there it has no trace function, so that neither coverage nor a debugger
    takes it for the user's code, and no callers, so that its frames keep nobody's variables alive.
    """
    codes = []
    for line in map(_harmless, lines[:_MOST]):
        try:
            codes.append(_raising(line))
        except (ValueError, SyntaxError, OverflowError, TypeError):
            continue
        _remember(line)
    if not codes:
        return None
    stops: list[TracebackType] = []
    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(_run, (codes, stops, done))
    done.acquire()
    made: TracebackType | None = None
    for stop in reversed(stops):
        made = TracebackType(made, stop.tb_frame, stop.tb_lasti, stop.tb_lineno)
    stops.clear()  # the frames refer to it through the frame that ran them
    return made


def _harmless(line: FrameLine) -> FrameLine:
    """Keeps Python from looking for source in what is no file (``/dev/zero``) or cannot be one."""
    name = line.filename
    if "\0" not in name and (os.path.isfile(name) or not os.path.exists(name)):
        return line
    return msgspec.structs.replace(line, filename=f"<{name}>".replace("\0", "?"))


def _run(codes: list[CodeType], stops: list[TracebackType], done: _thread.LockType) -> None:
    try:
        for code in codes:
            try:
                FunctionType(code, {"__builtins__": {}, "__name__": "", _STOP: _Stop})()
            except _Stop as stop:
                if stop.__traceback__ is not None and stop.__traceback__.tb_next is not None:
                    stops.append(stop.__traceback__.tb_next)
    finally:
        done.release()


class _Stop(Exception):
    """What the made-up code raises."""


@lru_cache(maxsize=256)
def _raising(line: FrameLine) -> CodeType:
    """Code that raises `_Stop` at the place of `line`."""
    if not 0 < line.lineno < _LAST_LINE:
        raise ValueError(f"line {line.lineno}")
    start, end, last = line.colno, line.end_colno, line.end_lineno
    if start is None or end is None or last is None or min(start, end) < 0 or last < line.lineno:
        start, end, last = -1, -1, line.lineno
    first = line.first if line.first is not None and 0 < line.first <= line.lineno else line.lineno
    place = {"lineno": line.lineno, "end_lineno": last, "col_offset": start, "end_col_offset": end}
    around = {"lineno": first, "end_lineno": last, "col_offset": 0, "end_col_offset": 0}
    statement = ast.Raise(ast.Name(_STOP, ast.Load(), **place), None, **place)
    definition = ast.parse("def raising(): pass").body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.body = [statement]
    for name, value in around.items():
        setattr(definition, name, value)
    module = compile(ast.Module([definition], []), "<invivo>", "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    return code.replace(co_filename=line.filename, co_name=line.name, co_qualname=line.name)


def _remember(line: FrameLine) -> None:
    """Puts a line's text where Python looks for source, if the file is not here (a package of a remote engine)."""
    if not line.line or line.lineno > _LAST_REMEMBERED or linecache.getline(line.filename, line.lineno):
        return
    if os.path.exists(line.filename) or (line.filename not in _remembered and linecache.getlines(line.filename)):
        return
    _remembered.add(line.filename)
    known = list(linecache.getlines(line.filename))
    known.extend(["\n"] * (line.lineno - len(known)))
    known[line.lineno - 1] = line.line + "\n"
    linecache.cache[line.filename] = (len(known), None, known, line.filename)


_remembered: set[str] = set()
