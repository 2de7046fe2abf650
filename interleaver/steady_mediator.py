"""A block that does the same in every step and only reads, and so may have several steps in one turn.

See `lagging_hub`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import greenlet
import torch

from ..envoy.address import Port
from .bounds import Bounds
from .mediator import Mediator
from .torch_compat import version_of
from .values import Held
from .views import Part, view
from .waits import EndWait, StepWait, Wait

Column: TypeAlias = "Sequence[Any] | dict[int, Sequence[Any]]"
"""Copies of what passes at a port, one for each step; or those of some items of a tuple, by their places."""


class _Kept(Held):
    """What the block holds of a port of a kept step: a copy that must stay as it is.

    Attributes:
        items: those tensors of a tuple that were kept, by their places, each with its copies of all steps.
        number: of the step.
    """

    __slots__ = ("items", "number")

    def __init__(self) -> None:
        self.value: object = None
        self.items: Mapping[int, Sequence[object]] = {}
        self.number = 0
        self.changed = None

    def item(self, index: int) -> object:
        """See `Held`."""
        return self.items[index][self.number] if self.value is _ITEMS else super().item(index)

    def assign(self, value: object, where: str) -> None:
        """See `Held`."""
        self.changed = []

    def settle(self, bounds: Bounds | None = None) -> None:
        """See `Held`; whether the copies were changed is seen when the block has been given all steps."""


_ITEMS = object()
"""Only some tensors of a tuple were kept."""


class SteadyMediator(Mediator):
    """A mediator that can be given kept steps.

    Attributes:
        trail: the ports that the block came to in the last step that it had at its time, in order.
        before: those of the step before that.
        wants: of each port that it ever came to, the places of the items of a tuple that it looked at; None for all.
        calls: it has called a module.
        strayed: with a kept step it has done something else than reading the same ports in the same order.
    """

    calls = False
    strayed = False
    _columns: Sequence[Column] = ()
    _count = _number = _at = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trail: list[Port] = []
        self.before: list[Port] = []
        self.wants: dict[Port, frozenset[int] | None] = {}
        self._copy = _Kept()

    @property
    def ready(self) -> bool:
        """Whether it does the same as ever, as far as can be seen, and waits for its next step."""
        wait = self.wait
        usual = self.trail == self.before and len(self.trail) > 0 and not (self.calls or self.edited)
        return usual and self.alone and type(wait) is StepWait and wait.step == self.step + 1

    def catch_up(self, columns: Sequence[Column], count: int) -> None:
        """Have the turns of kept steps, the next ones.

        Args:
            columns: for each port of the trail, the copies, one for each step; where only some items of a tuple were
                kept, these by their places.
            count: of the steps.
        """
        self._columns, self._count, self._number = columns, count, -1
        try:
            while not self.strayed and self._number + 1 < count and self._waits_for_next:
                self.at_step(self.step + 1)
        finally:
            self._columns, self._count = (), 0
        stands = not self.done and not self._waits_for_next
        if stands or self._copy.changed is not None or any(_changed(column) for column in columns):
            self.strayed = True

    @property
    def _waits_for_next(self) -> bool:
        return type(self.wait) is StepWait and self.wait.step == self.step + 1

    def at_step(self, step: int) -> None:
        """See `Mediator`."""
        if self._count:
            self._number, self._at = self._number + 1, -1
        else:
            self.before, self.trail = self.trail, []
        super().at_step(step)

    # --- the block's side

    def advance(self, step: int) -> bool:
        """See `Mediator`; goes on to the next kept step without handing over, if the turn has not lasted long."""
        number = self._number + 1
        if number < self._count and step == self.step + 1 and self._may_go_on():
            self.step, self._number, self._at = step, number, -1
            self.port = self.held = None
            return True
        return super().advance(step)

    def read(self, port: Port, part: Part) -> object:
        """See `Mediator`."""
        if port is not self.port:
            self._go(port)
        value = self.held.value  # type: ignore[union-attr]  # at a port there is one
        if value is _ITEMS:
            self._stray(port)
        elif not self._count:
            self.wants[port] = None
        return view(value, part) if part == "input" else value

    def read_item(self, port: Port, index: int) -> object:
        """See `Mediator`."""
        if port is not self.port:
            self._go(port, index)
        held = self.held
        if held is self._copy:
            if self._copy.value is _ITEMS and index not in self._copy.items:
                self._stray(port)
        elif (wants := self.wants.get(port, frozenset())) is not None and index not in wants:
            self.wants[port] = wants | {index}
        return held.item(index)  # type: ignore[union-attr]

    def call(self, address: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """See `Mediator`; a module is called while the model runs."""
        self.calls = True
        if self._count:
            self._stray(EndWait())
        return super().call(address, args, kwargs)

    def stop(self) -> None:
        """See `Mediator`; the request has gone on."""
        self.strayed = self.strayed or self._count > 0
        super().stop()

    def _go(self, port: Port, asks: int | None = None) -> None:
        if not self._count:
            self.trail.append(port)
            super()._go(port, asks)
            return
        self._at = at = self._at + 1
        if at < len(self.trail) and self.trail[at] is port and greenlet.getcurrent() is self._greenlet:
            copy, column = self._copy, self._columns[at]
            if type(column) is dict:
                copy.value, copy.items, copy.number = _ITEMS, column, self._number
            else:
                copy.value = column[self._number]
            self.port, self.held = port, copy
        else:
            self._stray(port)

    def _may_go_on(self) -> bool:
        """Whether the turn goes on with another step: not if it has lasted long, since each has its limit of time."""
        guard = self._guard
        if guard is not None:
            if guard.long:
                return False
            if self.saved or guard.error is not None:
                guard.check(self.saved)
        return greenlet.getcurrent() is self._greenlet

    def _stray(self, wait: Wait) -> None:
        """Do what cannot be done with a kept step: the block does not come back from here."""
        self.strayed = True
        self.hand_over(wait)


def _changed(column: Column) -> bool:
    """Whether copies of a port were changed, which were new; also if that was no edit, since the block had gone on."""
    if isinstance(column, dict):
        return any(map(_changed, column.values()))
    if isinstance(column[0], torch.Tensor):
        return any(map(version_of, column))
    return any(map(version_of, chain.from_iterable(column)))
