"""Values that have passed at ports whose blocks have their turns afterwards.

Where nobody edits what passes, a forward need not wait at a port for the blocks: it keeps a copy, goes on, and they are
served from the copies (`vllm_backend.graphs`). The logits are there, too, when blocks begin a step behind the forward.

So what a block asks for next is often there already. It takes it and runs on, without handing over: handing over costs
more than all else at a port. In this way blocks have their turns in another order than the ports fire in, which only
those could notice that share something with others. They hand over at each port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

import torch

from ..envoy.errors import UnsupportedError
from .torch_compat import clone_each, inference_mode, version_of
from .values import Change, Held, Passing, Versions, copies, rows_of
from .windows import Window

if TYPE_CHECKING:
    from ..envoy.address import Port
    from .mediator import Mediator

_numbers = count()
_NO_HABIT: tuple[int, tuple[int, ...]] = (-1, ())

_Layout = tuple[tuple["Window | None", tuple[int, ...]], ...]


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
        self._passing = [Passing(value, port) for port, value in passed]
        once = all(len(places) == 1 for places in order.values())
        self._index = {port: at for at, (port, _) in enumerate(passed)} if once else {}
        self._places = [order[port][0] if port in order else None for port, _ in passed]
        self._made: dict[Mediator, dict[int, object]] = {}
        self._reads: dict[Mediator, list[int]] = {}
        self._version = 0
        self._layout: _Layout = ()
        self._views: list[torch.Tensor] = []
        self._plan: list[list[tuple[int, int]]] = []

    def index(self, port: Port) -> int | None:
        """The place of a port among these; None if it is not there, or some ports come several times in a forward."""
        return self._index.get(port)

    def expects(self, mediator: Mediator) -> bool:
        """Whether a block that is about to begin a step may do so behind these ports: in the last one it asked for
        some of them."""
        step, _ = mediator.habits.get(self._number, _NO_HABIT)
        return step == mediator.step and mediator.alone and bool(self._index)

    def begin(self, blocks: Iterable[tuple[Mediator, Window | None, int | None]]) -> None:
        """Copy, in one call, what blocks ask for now and what they will ask for if they do as in the step before.

        Args:
            blocks: with their rows, and the port that they wait for.
        """
        self.at, self.edits, self._made, self._reads = 0, {}, {}, {}
        mediators, layout = [], []
        for mediator, window, at in blocks:
            _, reads = mediator.habits.get(self._number, _NO_HABIT)
            if at is not None and (not reads or reads[0] != at):
                reads = (at,)
            if reads:
                mediators.append(mediator)
                layout.append((window, reads))
        if not layout:
            return
        if len(self.passed) == 1 and not self._lasts:
            (port, value), windows = self.passed[0], [window for window, _ in layout]
            single, versions = copies(value, windows, port)
            if isinstance(versions, int):
                self._version = versions
                self._made = {mediator: {0: copy} for mediator, copy in zip(mediators, single, strict=True)}
            return
        with inference_mode(False):
            if tuple(layout) != self._layout:
                self._lay_out(tuple(layout))
            if not self._views:
                return
            made = clone_each(self._views)
        self._version = version_of(made[0])
        end = 0
        for mediator, plan in zip(mediators, self._plan, strict=True):
            mine: dict[int, object] = {}
            for at, tensors in plan:
                begin, end = end, end + (tensors or 1)
                mine[at] = tuple(made[begin:end]) if tensors else made[begin]
            self._made[mediator] = mine

    def end(self) -> None:
        """All blocks have had their turns."""
        self._made = {}
        for mediator, reads in self._reads.items():
            mediator.habits[self._number] = mediator.step, tuple(reads)
        self._reads = {}

    def copies(
        self, mediators: Sequence[Mediator], windows: Sequence[Window | None]
    ) -> tuple[Sequence[object], Versions]:
        """Copies of what passed at the port that fires; see `values.copies`."""
        at = self.at
        for mediator in mediators:
            self._note(mediator, at)
        made = [mine.pop(at, None) if (mine := self._made.get(mediator)) else None for mediator in mediators]
        if all(copy is not None for copy in made):
            return made, self._versions(made[0])
        port, value = self.passed[at]
        return copies(value, windows, port)

    def take(self, mediator: Mediator, port: Port) -> Held | None:
        """What a block gets that runs on to a port; None if it has to wait."""
        at = self._index.get(port)
        if at is None:
            return None
        window = mediator.share.last if port.of_step else mediator.share.rows
        mine = self._made.get(mediator)
        copy = mine.pop(at, None) if mine else None
        if copy is not None:
            versions = self._versions(copy)
        else:
            try:
                (copy,), versions = copies(self.passed[at][1], [window], port)
            except UnsupportedError:
                return None  # raised where the port fires
        self._note(mediator, at)
        mediator.place.move(port, self._places[at])
        held = Held(copy, versions, window, self._passing[at])
        mediator.ran_on = at, held
        return held

    def _note(self, mediator: Mediator, at: int) -> None:
        reads = self._reads.get(mediator)
        if reads is None:
            self._reads[mediator] = [at]
        else:
            reads.append(at)

    def _versions(self, copy: object) -> Versions:
        return [self._version] * len(copy) if isinstance(copy, tuple) else self._version

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
