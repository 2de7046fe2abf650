"""The block that is running now, as its ports see it.

`Session` is what an Envoy talks to; the interleaver implements it. Which session is running is a context variable:
each greenlet has a context of its own, so blocks never see each other's.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from .address import Port
from .errors import OutsideBlockError
from .tree import ModuleTree


class Session(Protocol):
    """One running block."""

    tree: ModuleTree

    def read(self, port: Port, part: str) -> object:
        """Wait for the port and return a private copy of `part` of it (``input``, ``inputs``, ``output``, ...)."""
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

    def save(self, value: object, *, stream: bool, names: tuple[str, ...]) -> object:
        """Mark a value to be sent home; returns it."""
        ...

    def warn(self, message: str) -> None:
        """Have a warning shown where the `with` ends."""
        ...


_SESSION: ContextVar[Session | None] = ContextVar("invivo_session", default=None)


current = _SESSION.get
"""The session of the block that is running, or None."""


def enter(session: Session) -> None:
    """Make `session` the running one in this context (a greenlet calls it once, at its start)."""
    _SESSION.set(session)


def session(what: str) -> Session:
    """The running session.

    Raises:
        OutsideBlockError: no block is running; `what` names the thing that needs one.
    """
    running = _SESSION.get()
    if running is None:
        raise OutsideBlockError(
            f"{what} exists only while a block runs. Use it inside `with model.trace(...) as tracer:`; "
            "to have a value afterwards, save it there with `.save()`."
        )
    return running
