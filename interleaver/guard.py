"""Keeping one block within its limits, and an exception that ends it within the block.

The watchdog (`watchdog.py`, a thread of its own) sees that a turn goes over a limit and calls `Guard.stop`, which has
an `OverLimit` raised in the thread that runs the model. That must reach the block and never the engine. So:

- `number` is odd while the block has its turn. The thread that runs the model counts it up, and takes no lock for it.
- `stop` first notes the error, then looks at the number, then has the exception raised. The model's thread, when the
  turn is over, first counts up, then looks at the error. Whichever is first: either `stop` sees that the turn is over,
  or the model's thread sees the error, waits until `stop` is done, and takes an exception back that is still to come.
- Python raises such exceptions between instructions, but only at calls, at function entries and at the turns of loops.
  Nothing of that kind is between the block's switch back and the counting. What is raised just behind the switch
  is caught there.
- In the main thread the exception comes by a signal, whose handler raises only if the block is what runs.

An `OverLimit` is no `Exception`, so most code lets it pass. To a block that catches it and goes on, it is raised again;
after the third time it is raised anew whenever it is caught, which no code outlasts.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

import greenlet

from ..envoy.errors import SaveLimitError
from ..tracer.failure import of_invivo
from ..tracer.tracebacks import frame_lines, make_traceback
from .async_error import again_when_caught, raise_in, take_back
from .limits import Limits
from .memory import shown
from .meter import Meter
from .watchdog import WATCHDOG, Seen

if TYPE_CHECKING:
    from ..tracer.naming import Saved

_PATIENCE = 3
"""How often a block may catch the exception and go on."""

_COUNTED = 8
"""Saves are counted at one in so many hand-overs: counting a tensor takes about as long as half a hand-over."""


class OverLimit(BaseException):
    """Unwinds a block that went over a limit. Each guard has a subclass of its own, since only classes can be raised in
    another thread."""

    guard: ClassVar[Guard]


class _Kind:
    """Makes the exception of a guard when it is first asked for, as few blocks go over a limit and a class takes long.

    That is in `stop`, before it has anything raised, so nothing is raised in here. Two threads get the same one. Then
    it is an ordinary attribute: Python that ran where the exception is looked for would have it raised once more.
    """

    def __get__(self, guard: Guard, _owner: type[Guard]) -> type[OverLimit]:
        attributes: dict[str, type[OverLimit]] = vars(guard)
        return attributes.setdefault("kind", type("OverLimit", (OverLimit,), {"guard": guard}))


class Guard:
    """The limits of one block.

    Attributes:
        kind: the exception that ends the block.
        limits: the limits.
        error: what the block is ended with; None as long as it is within its limits.
        number: of the turn that runs, if odd.
        seen: what the watchdog knows of the turn.
    """

    kind = _Kind()

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.error: BaseException | None = None
        self.number = 0
        self.seen: Seen | None = None
        self._thread = 0
        self._block: greenlet.greenlet | None = None
        self._stops = self._thrown = self._hand_overs = 0
        self._meter = Meter() if limits.saves is not None else None
        self._lock = threading.Lock()

    # --- the model's thread

    def turn(self, block: greenlet.greenlet, value: object, error: BaseException | None) -> object:
        """Give the block its turn, with a value or an exception.

        Returns:
            What it handed over; None if it has ended, or must.
        """
        if self._block is None:
            self._block, self._thread = block, threading.get_ident()
            WATCHDOG.add(self)
        given = None
        try:
            try:
                self.number += 1
                if WATCHDOG.asleep:
                    WATCHDOG.wake()
                given = block.switch(value) if error is None else block.throw(error)
            finally:
                self.number += 1
                if self.error is not None:
                    self.kind.__init__ = BaseException.__init__  # type: ignore[method-assign]  # not again from here on
        except self.kind:
            given = None
        if self.error is None:
            return given
        while True:
            try:
                return self._after(block, given)
            except self.kind:  # one that was on its way
                continue

    def check(self, saved: list[Saved]) -> None:
        """Called by the block when it is about to hand over: not if it is over a limit.

        Raises:
            OverLimit: it is.
        """
        limit, self._hand_overs = self.limits.saves, self._hand_overs + 1
        if self._meter is not None and limit is not None and self._hand_overs % _COUNTED == 0:
            if self._meter.update(saved, limit):
                with self._lock:
                    self.error = self.error or save_error(self._meter.total, limit)
        if self.error is not None:
            raise self.kind

    @property
    def long(self) -> bool:
        """The turn has lasted so long that the watchdog has seen it."""
        return self.seen is not None and self.seen.number == self.number

    def end(self, block: greenlet.greenlet, error: BaseException) -> None:
        """End a block from outside."""
        self.error = self.error or error
        self.turn(block, None, greenlet.GreenletExit())

    def lighter(self, failure: BaseException | None) -> BaseException | None:
        """The error that a block over its limits has ended with: with the lines of `failure`, without its variables."""
        if self.error is None:
            return None
        traceback = failure.__traceback__ if failure is not None else None
        lines = frame_lines(traceback, lambda module: not of_invivo(module), everywhere=True) if traceback else ()
        return self.error.with_traceback(make_traceback(lines))

    def leave(self) -> None:
        """The block has ended."""
        WATCHDOG.remove(self)
        self._block = None

    def inside(self) -> bool:
        """Whether the code that runs now is the block's, or of something that runs inside of it."""
        current: greenlet.greenlet | None = greenlet.getcurrent()
        while current is not None and current is not self._block:
            current = current.parent
        return current is not None

    def _after(self, block: greenlet.greenlet, given: object) -> object:
        """After a turn that `stop` was called in: the block must end if it has not."""
        with self._lock:  # `stop` is done then
            take_back()
        while self.error is not None and block and self._thrown < _PATIENCE:
            self._thrown += 1
            self.turn(block, None, self.kind())
        return given if self.error is None else None

    # --- the watchdog's thread

    def stop(self, number: int, error: BaseException) -> None:
        """End the block with `error`, if it still has that turn."""
        kind = self.kind
        with self._lock:
            before, self.error = self.error, error
            if self._stops >= _PATIENCE:
                kind.__init__ = again_when_caught(self._thread, kind)  # type: ignore[method-assign]
            if self.number != number:
                self.error = before
                kind.__init__ = BaseException.__init__  # type: ignore[method-assign]
                return
            self._stops += 1
            if not WATCHDOG.waker.try_wake(self._thread):
                raise_in(self._thread, kind)


def save_error(size: int, limit: int) -> SaveLimitError:
    """The error of a trace that saves too much."""
    return SaveLimitError(
        f"the values that this trace saves hold {shown(size)}, and the limit is {shown(limit)}. Save less of them (a "
        "row, a mean, a lower precision; `.clone()` a small part of a large tensor, which it would keep whole), split "
        f"the work over several traces, or make the model with a higher `save_limit` than {limit}."
    )
