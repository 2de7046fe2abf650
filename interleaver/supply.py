"""Values that have passed at ports whose blocks have their turns afterwards.

Where nobody edits what passes, a forward need not wait at a port for the blocks: it keeps a copy, goes on, and they are
served from the copies (`vllm_backend.graphs`). The logits are there, too, when blocks begin a step behind the forward.

So what a block asks for next is often there already. It takes it and runs on, without handing over: handing over costs
more than all else at a port. In this way blocks have their turns in another order than the ports fire in, which only
those could notice that share something with others. They hand over at each port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

import torch

from ..envoy.errors import UnsupportedError
from .torch_compat import clone_each, inference_mode, version_of
from .values import Change, Held, Passing, Versions, copies, copy_of, rows_of
from .windows import Share, Window

if TYPE_CHECKING:
    from ..envoy.address import Port
    from .mediator import Mediator

_Layout = tuple[tuple["Window | None", tuple[int, ...]], ...]

_numbers = count()
_NO_HABIT: tuple[int, tuple[int, ...]] = (-1, ())


class _Own:
    """What one block gets in a step: the copies that are made already, by port, and the ports that it came to."""

    __slots__ = ("copies", "reads")

    def __init__(self) -> None:
        self.copies: dict[int, tuple[object, Versions]] = {}
        self.reads: list[int] = []


class Supply:
    """What has passed at some ports.

    Args:
        passed: the ports in the order of the forward, with what passed there.
        order: the places of all ports in that order.
        number: of supplies that hold the same ports in each step; None for one that lasts.

    Attributes:
        passed: see above; values may be other ones in the next step, in the same memory.
        at: the port that fires now.
        edits: what blocks that ran on have put in the place of what passed, by port.
    """

    def __init__(
        self,
        passed: Sequence[tuple[Port, object]],
        order: Mapping[Port, Sequence[int]],
        number: int | None = None,
    ) -> None:
        self.passed = passed
        self.at = 0
        self.edits: dict[int, list[Change]] = {}
        self._lasts = number is None
        self._number = next(_numbers) if number is None else number
        self._of_step = passed[0][0].of_step
        self._passing = [Passing(value, port) for port, value in passed]
        once = all(len(places) == 1 for places in order.values())
        self._index = {port: at for at, (port, _) in enumerate(passed)} if once else {}
        self._places = [order[port][0] if port in order else None for port, _ in passed]
        self._own: dict[Mediator, _Own] = {}
        self._layout: _Layout = ()
        self._views: list[torch.Tensor] = []
        self._plan: list[list[tuple[int, int]]] = []

    def expects(self, mediator: Mediator) -> bool:
        """Whether a block that is about to begin a step may do so behind these ports: in the last one it asked for
        some of them."""
        step, _ = mediator.habits.get(self._number, _NO_HABIT)
        return step == mediator.step and mediator.alone and bool(self._index)

    # --- a step

    def begin(self, waiting: Mapping[Port, Sequence[Mediator]], late: Mapping[Mediator, Share]) -> None:
        """Copy, in one call, what blocks ask for now and what they will ask for if they do as in the step before.

        Args:
            waiting: the blocks that wait for each port.
            late: those that have yet to begin the step, with their rows.
        """
        self.at, self.edits, self._own = 0, {}, {}
        mediators: list[Mediator] = []
        layout: list[tuple[Window | None, tuple[int, ...]]] = []
        for mediator, share in late.items():
            _, reads = mediator.habits.get(self._number, _NO_HABIT)
            if reads and mediator.alone:
                mediators.append(mediator)
                layout.append((share.last if self._of_step else share.rows, reads))
        for port, blocks in waiting.items():
            at = self._index.get(port)
            for mediator in blocks if at is not None else ():
                _, reads = mediator.habits.get(self._number, _NO_HABIT)
                mediators.append(mediator)
                layout.append((self._rows(mediator), reads if reads and reads[0] == at else (at,)))  # type: ignore[arg-type]
        if not layout:
            return
        if len(self.passed) == 1 and not self._lasts:
            (port, value), windows = self.passed[0], [window for window, _ in layout]
            single, versions = copies(value, windows, port)
            for mediator, copy in zip(mediators, single, strict=True):
                self._of(mediator).copies[0] = copy, versions
            return
        with inference_mode(False):
            if tuple(layout) != self._layout:
                self._lay_out(tuple(layout))
            if not self._views:
                return
            made = clone_each(self._views)
        version, end = version_of(made[0]), 0
        for mediator, plan in zip(mediators, self._plan, strict=True):
            mine = self._of(mediator).copies
            for at, tensors in plan:
                begin, end = end, end + (tensors or 1)
                mine[at] = (tuple(made[begin:end]), [version] * tensors) if tensors else (made[begin], version)

    def end(self) -> None:
        """All blocks have had their turns."""
        for mediator, own in self._own.items():
            if own.reads:
                mediator.habits[self._number] = mediator.step, tuple(own.reads)
        self._own = {}

    def copies(
        self, mediators: Sequence[Mediator], windows: Sequence[Window | None]
    ) -> tuple[Sequence[object], Versions]:
        """Copies of what passed at the port that fires; see `values.copies`."""
        made = []
        for mediator in mediators:
            own = self._of(mediator)
            own.reads.append(self.at)
            made.append(own.copies.pop(self.at, None))
        there = [found for found in made if found is not None]
        if len(there) == len(made):
            return [copy for copy, _ in there], there[0][1]
        port, value = self.passed[self.at]
        return copies(value, windows, port)

    def take(self, mediator: Mediator, port: Port) -> Held | None:
        """What a block gets that runs on to a port; None if it has to wait."""
        at = self._index.get(port)
        if at is None:
            return None
        own, window = self._of(mediator), self._rows(mediator)
        found = own.copies.pop(at, None)
        if found is None:
            try:
                copy, versions = copy_of(self.passed[at][1], window, port)
            except UnsupportedError:
                return None  # raised where the port fires
        else:
            copy, versions = found
        own.reads.append(at)
        held = Held(copy, versions, window, self._passing[at])
        mediator.ran_on = at, held
        mediator.place.move(port, self._places[at])
        return held

    def left(self, mediator: Mediator) -> bool:
        """See what a block has left at the port that it ran on to; whether it has edited there."""
        assert mediator.ran_on is not None, "it ran on"
        (at, held), mediator.ran_on = mediator.ran_on, None
        if held.changed is None or mediator.failure is not None:
            return False
        mediator.edited = mediator.edited or not self._of_step
        self.edits.setdefault(at, []).append((held.changed, self._rows(mediator)))
        return True

    # --- inside

    def _rows(self, mediator: Mediator) -> Window | None:
        return mediator.share.last if self._of_step else mediator.share.rows

    def _of(self, mediator: Mediator) -> _Own:
        own = self._own.get(mediator)
        if own is None:
            own = self._own[mediator] = _Own()
        return own

    def _lay_out(self, layout: _Layout) -> None:
        """The rows of each block at each of its ports, as views of what passed."""
        self._layout, self._views, self._plan = layout, [], []
        for window, reads in layout:
            plan = []
            for at in reads:
                port, value = self.passed[at]
                try:
                    rows = rows_of(value, window, port)
                except UnsupportedError:
                    continue  # raised where the port fires
                if rows is not None:
                    self._views += rows
                    plan.append((at, 0 if isinstance(value, torch.Tensor) else len(rows)))
            self._plan.append(plan)
