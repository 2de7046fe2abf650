"""The block that is running now, as its ports see it.

`Session` is what an Envoy talks to; the interleaver implements it. Which session is running is a context variable:
each greenlet has a context of its own, so blocks never see each other's. The body of a trace without a prompt runs in
the caller's own context; it has no ports, but values can be saved in it (`Outer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from .address import Port
from .errors import OutsideBlockError
from .tree import ModuleTree


class Session(Protocol):
    """One running block."""

    __slots__ = ()

    tree: ModuleTree

    def read(self, port: Port, part: str) -> object:
        """Wait for the port and return a private copy of `part` of it (``input``, ``inputs``, ``output``, ...)."""
        ...

    def read_item(self, port: Port, index: int) -> object:
        """`read` of the port's output and ``[index]`` of that; where it is a tuple, nothing else of it is copied."""
        ...

    def write(self, port: Port, part: str, value: object) -> None:
        """Wait for the port, check `value` against it and let the model go on with it."""
        ...

    def call(self, address: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the real module on the block's own values."""
        ...

    def advance(self, step: int) -> bool:
        """Move to a step; False if the request ended before it."""
        ...

    def result(self) -> object:
        """Wait for the end of the request and return its finished output."""
        ...

    def stop(self) -> None:
        """End the request in this step; does not return."""
        ...

    def meet(self, barrier: str, count: int) -> None:
        """Wait until `count` blocks of the trace have come to a barrier."""
        ...

    def save(self, value: object, *, stream: bool, names: tuple[str, ...]) -> object:
        """Mark a value to be sent home; returns it."""
        ...

    def warn(self, message: str) -> None:
        """Have a warning shown where the `with` ends."""
        ...


class Outer(Protocol):
    """The running body of a trace without a prompt, around its invokes."""

    def save(self, value: object, *, stream: bool, names: tuple[str, ...]) -> object:
        """Have a value bound where the `with` ends; returns it."""
        ...


_OUTER: ContextVar[Outer | None] = ContextVar("invivo_outer", default=None)
_SESSION: ContextVar[Session | None] = ContextVar("invivo_session", default=None)


current = _SESSION.get
"""The session of the block that is running, or None."""


def enter(session: Session) -> None:
    """Make `session` the running one in this context (a greenlet calls it once, at its start)."""
    _SESSION.set(session)


@contextmanager
def around_invokes(outer: Outer) -> Iterator[None]:
    """While the context lasts, `outer` is the body around invokes that runs here."""
    token = _OUTER.set(outer)
    try:
        yield
    finally:
        _OUTER.reset(token)


def session(what: str) -> Session:
    """The running session.

    Raises:
        OutsideBlockError: no block is running; `what` names the thing that needs one.
    """
    running = _SESSION.get()
    if running is None:
        if _OUTER.get() is not None:
            raise OutsideBlockError(
                f"{what} exists only next to the model, and the body of a trace without a prompt runs here. Use it "
                "inside `with tracer.invoke(prompt):`."
            )
        raise OutsideBlockError(
            f"{what} exists only while a block runs. Use it inside `with model.trace(...) as tracer:`; "
            "to have a value afterwards, save it there with `.save()`."
        )
    return running


def saver(what: str) -> Session | Outer:
    """What takes a saved value: the running session, or else the body around invokes.

    Raises:
        OutsideBlockError: neither is there.
    """
    outer = _OUTER.get() if _SESSION.get() is None else None
    return outer if outer is not None else session(what)
