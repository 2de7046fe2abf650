"""What cannot leave the process, and why; and where in a value it is."""

from __future__ import annotations

import asyncio
import functools
import io
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    TracebackType,
)
from typing import Any

from ..envoy.envoy import Envoy
from . import by_value
from .buffers import Refusal
from .handed import HandedOn
from .node_writer import quoted

_REASONS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((GeneratorType, AsyncGeneratorType), "a generator has no value to send; make a list of it"),
    (
        (CoroutineType, asyncio.Future),
        "what can be awaited lives in this event loop; await it before the trace",
    ),
    ((asyncio.AbstractEventLoop,), "an event loop lives in this process"),
    ((socket.socket,), "a connection lives in this process"),
    ((subprocess.Popen,), "the handle of a process is of use in this process only"),
    (
        (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore),
        "locks live in this process; create it in the block if the block needs one",
    ),
    (
        (threading.Thread, threading.Event, threading.Barrier, threading.local),
        "threads live in this process",
    ),
    ((weakref.ref,), "a weak reference has nothing to refer to in another process"),
    ((FrameType, TracebackType), "frames live in this process; make text of it before the trace"),
)
_ENGINES = frozenset({"LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine"})
_DEPTH, _TRIES = 8, 400


def refuse(value: object) -> None:
    """Raises `Refusal` with the reason if `value` is bound to this process."""
    if isinstance(value, io.IOBase):
        if not isinstance(value, io.BytesIO | io.StringIO):
            raise Refusal("an open file lives in this process; read it before the trace")
        return
    if isinstance(value, HandedOn):
        raise Refusal(
            f"it stands for {value.described}, which exists only next to the model; the block can read it under that "
            "name and no other"
        )
    for kinds, reason in _REASONS:
        if isinstance(value, kinds):
            raise Refusal(reason)
    kind = type(value)
    if kind.__name__ in _ENGINES and kind.__module__.partition(".")[0] == "vllm":
        raise Refusal("an engine lives in this process; use the Envoys of the traced model")


def find(
    value: object, attempt: Callable[[object], Exception | None], error: Exception
) -> tuple[str, object, Exception]:
    """Looks for the innermost part of `value` that cannot be sent.

    Args:
        value: something that cannot be sent.
        attempt: tries to send a value; returns what was raised, or None.
        error: what was raised for `value`.

    Returns:
        The part's path, such as ``["a"].b``; the part; and what is raised for it alone.
    """
    path, tries = "", _TRIES
    seen = {id(value)}
    for _ in range(_DEPTH):
        if isinstance(value, Envoy) or _refused(value):
            break
        for step, part in _parts(value):
            if tries == 0:
                return path, value, error
            if id(part) in seen:
                continue
            seen.add(id(part))
            tries -= 1
            raised = attempt(part)
            if raised is not None:
                path, value, error = path + step, part, raised
                break
        else:
            break
    return path, value, error


def _refused(value: object) -> bool:
    try:
        refuse(value)
    except Refusal:
        return True
    return False


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{quoted(key)}]", value[key]) for key in list(value))
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f" (item {item!r})", item) for item in list(value))
    elif isinstance(value, FunctionType):
        if by_value.by_name(value):
            return
        scope = value.__globals__
        names = (name for name in by_value.global_names(value.__code__) if name in scope)
        yield from ((f" -> global `{name}`", scope[name]) for name in names)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f" -> closure variable `{name}`", cell.cell_contents
            except ValueError:
                continue
        yield from ((f" -> default {index}", item) for index, item in enumerate(value.__defaults__ or ()))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif not isinstance(value, type) or not by_value.by_name(value):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, Mapping):
            yield from ((f".{name}", item) for name, item in list(attributes.items()) if name != "__dict__")
        if not isinstance(value, type):
            yield f" (its class {type(value).__name__})", type(value)
