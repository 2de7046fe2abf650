"""Exceptions on their way home: what happened in a block as data, and back to a native exception.

`describe` runs where the block ran: it notes the exception's type by name, its arguments, and one `FrameLine`
for each frame of the traceback that is of interest to the user. `rebuild` runs where the `with` is: it finds
the type among the modules that are loaded already, and gives the exception a traceback (see `tracebacks`).
Like saved values, failures are data: nothing in them is unpickled, imported or looked up by running code.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from ..envoy.errors import BlockError, InternalError, InvivoError
from .results import from_bytes, to_bytes
from .tracebacks import FrameLine, frame_lines, make_traceback, valid
from .types_by_name import find_type, full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_DEPTH = 16
_LONGEST = 20_000
_PRIMITIVES = (type(None), bool, int, float, complex, str, bytes)
_HINTED = (NameError, AttributeError, ImportError)


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """One exception.

    Attributes:
        module: `__module__` of the exception's type.
        qualname: `__qualname__` of the type.
        args: `results.to_bytes` of ``{"args": tuple, "state": dict}``: the arguments and the instance's
            attributes, as far as they are numbers and text or lists, tuples and dicts of these; other
            arguments are replaced by their `repr`.
        message: ``str()`` of the exception.
        frames: the frames of the traceback, outermost first.
        notes: the exception's notes.
        port: the port that the block was at, such as ``model.layers.5.output``.
        step: the step that the block was at.
        cause: `__cause__`.
        context: `__context__`, where a traceback would show it.
        members: the exceptions of an exception group.
    """

    module: str
    qualname: str
    args: bytes
    message: str
    frames: tuple[FrameLine, ...] = ()
    notes: tuple[str, ...] = ()
    port: str | None = None
    step: int | None = None
    cause: Failure | None = None
    context: Failure | None = None
    members: tuple[Failure, ...] = ()


def of_invivo(module: str) -> bool:
    """Whether a module, by name, is invivo's own."""
    return module == "invivo" or module.startswith("invivo.")


def describe(
    error: BaseException,
    *,
    keep: Callable[[str], bool] = lambda module: not of_invivo(module),
    port: str | None = None,
    step: int | None = None,
) -> Failure:
    """Makes data of an exception; never raises.

    Args:
        error: the exception, with its traceback.
        keep: whether the frames of a module, by name, are of interest. Frames that are not are left out above
            the first one that is; below it they are left out of the errors that invivo raises for the user's
            sake, and stay in all others. If no frame is of interest all are kept.
        port: the port that the block was at.
        step: the step that the block was at.
    """
    try:
        return _describe(error, keep, port, step, set(), _DEPTH)
    except Exception as second:  # an exception whose own attributes raise
        text = f"{type(error).__name__}, which could not be described because of a {type(second).__name__}"
        return Failure(module="", qualname="Exception", args=b"", message=text, port=port, step=step)


def _describe(
    error: BaseException,
    keep: Callable[[str], bool],
    port: str | None,
    step: int | None,
    seen: set[int],
    depth: int,
) -> Failure:
    seen.add(id(error))

    def chained(other: BaseException | None) -> Failure | None:
        if other is None or id(other) in seen or depth <= 0:
            return None
        return _describe(other, keep, None, None, seen, depth - 1)

    expected = isinstance(error, InvivoError) and not isinstance(error, InternalError)
    frames = frame_lines(error.__traceback__, keep, everywhere=expected)
    message, args = _text(error), _arguments(error)
    notes = [_sent(note) for note in _notes(error) if isinstance(note, str)]
    if isinstance(error, _HINTED) and (hint := _hint(error, message)):
        notes.append(hint)
    kind = type(error)
    return Failure(
        module=_sent(str(kind.__module__)),
        qualname=_sent(kind.__qualname__),
        args=args,
        message=message,
        frames=frames,
        notes=tuple(notes),
        port=port,
        step=step,
        cause=chained(error.__cause__),
        context=None if error.__suppress_context__ else chained(error.__context__),
        members=tuple(filter(None, map(chained, error.exceptions))) if isinstance(error, BaseExceptionGroup) else (),
    )


def _notes(error: BaseException) -> Iterable[object]:
    notes = getattr(error, "__notes__", ())
    return notes if isinstance(notes, list | tuple) else ()


def _text(error: BaseException) -> str:
    if isinstance(error, InternalError):
        return str(Exception.__str__(error))
    try:
        return _sent(str(error))
    except Exception:
        return f"<{type(error).__name__} whose text could not be made>"


def _sent(text: str) -> str:
    """Text that fits a message: valid UTF-8 and of a sensible length."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return valid(text)


def _hint(error: BaseException, message: str) -> str | None:
    """The "Did you mean" of Python's tracebacks, which needs the objects at hand."""
    try:
        last = traceback.TracebackException.from_exception(error, limit=-1).format_exception_only()
        _, found, hint = "".join(last).partition(f"{message}. Did you mean")
    except Exception:
        return None
    return f"Did you mean{hint}".splitlines()[0] if found else None


def _arguments(error: BaseException) -> bytes:
    args: tuple[object, ...] = error.args
    if isinstance(error, OSError) and len(args) == 2 and error.filename is not None:
        extra = (None, error.filename2) if error.filename2 is not None else ()
        args = (*args, error.filename, *extra)
    if isinstance(error, BaseExceptionGroup):
        args = (error.message,)
    state = {name: value for name, value in vars(error).items() if name != "__notes__" and _primitive(value)}
    try:
        packed = to_bytes({"args": tuple(arg if _primitive(arg) else _repr(arg) for arg in args), "state": state})
    except Exception:
        packed = b""
    return packed if 0 < len(packed) <= 4 * _LONGEST else to_bytes({"args": (_text(error),), "state": {}})


def _primitive(value: object, depth: int = 4) -> bool:
    kind = type(value)
    if kind in _PRIMITIVES:
        return True
    if depth == 0:
        return False
    if kind is dict:
        return all(_primitive(k, 0) and _primitive(v, depth - 1) for k, v in value.items())  # type: ignore[attr-defined]
    return kind in (list, tuple) and all(_primitive(item, depth - 1) for item in value)  # type: ignore[attr-defined]


def _repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 1000 else text[:997] + "..."


def rebuild(failure: Failure) -> BaseException:
    """Makes the exception again, with traceback, notes, cause and context.

    Its type is the original one if the caller's process has it; otherwise the exception is a `BlockError`
    with the type's name and the text. What a type's own constructor computed from other arguments is taken
    over, not computed again.
    """
    return _rebuild(failure, _DEPTH)


def _rebuild(failure: Failure, depth: int) -> BaseException:
    members = [_rebuild(member, depth - 1) for member in failure.members] if depth > 0 else []
    error = _instance(failure, members)
    error.__traceback__ = make_traceback(failure.frames)
    for note in failure.notes:
        error.add_note(note)
    if failure.port is not None:
        step = "" if failure.step is None else f", step {failure.step}"
        error.add_note(f"at port {failure.port}{step}")
    elif failure.step is not None:
        error.add_note(f"at step {failure.step}")
    if failure.cause is not None and depth > 0:
        error.__cause__ = _rebuild(failure.cause, depth - 1)
    elif failure.context is not None and depth > 0:
        error.__context__ = _rebuild(failure.context, depth - 1)
    else:
        error.__suppress_context__ = True
    return error


def _instance(failure: Failure, members: list[BaseException]) -> BaseException:
    kind = find_type(failure.module, failure.qualname, BaseException)
    try:
        content = from_bytes(failure.args)
        args, state = content["args"], content["state"]
    except Exception:
        args, state = (failure.message,), {}
    if kind is not None and isinstance(args, tuple) and isinstance(state, dict):
        if members:
            args = (*args[:1], members)
        error = _call(kind, args, failure.message, state) or _bare(kind, args, state)
        if error is not None:
            return error
    name = full_name(failure.module, failure.qualname)
    return BlockError(f"{name}: {failure.message}" if failure.message else name)


def _call(
    kind: type[BaseException], args: tuple[object, ...], message: str, state: dict[str, object]
) -> BaseException | None:
    """``kind(*args)``, if that gives what was described."""
    try:
        error = kind(*args)
        if type(error) is not kind or (not isinstance(error, BaseExceptionGroup) and _text(error) != message):
            return None
        error.__dict__.update(state)
    except Exception:
        return None
    return error


def _bare(kind: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException | None:
    """An instance on which no constructor written in Python has run."""
    native: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        error: BaseException = native.__new__(kind, *args)
        if type(error) is not kind:
            return None
        native.__init__(error, *args)
        error.args = args
        error.__dict__.update(state)
    except Exception:
        return None
    return error
