"""Blocks that come to barriers, and whom that lets go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from .mediator import Mediator
from .waits import BarrierWait


class Meetings:
    """The turns that barriers give.

    Args:
        turn: gives a block a turn, and sees what it waits for then.
    """

    def __init__(self, turn: Callable[[Mediator, Callable[[], None]], None]) -> None:
        self._turn = turn
        self._released: deque[Mediator] = deque()

    def come(self, mediator: Mediator, wait: BarrierWait) -> None:
        """A block has come to a barrier: if it is the last one, all go on, in invoke order."""
        assert mediator.member is not None, "there are barriers in a group only"
        going = mediator.member.arrive(mediator, wait.barrier, wait.count)
        if going is None:
            self.see_end(mediator)
            return
        first = not self._released
        self._released.extend(going)
        while first and self._released:  # a block that meets others again does not nest
            other = self._released[0]
            if isinstance(other.wait, BarrierWait):
                self._turn(other, other.go_on)
            self._released.popleft()

    def see_end(self, mediator: Mediator) -> None:
        """A block has ended, or waits: those of its trace at barriers that cannot fill any more get an error."""
        if mediator.member is not None:
            for other, error in mediator.member.stranded():
                self._turn(other, partial(other.fail, error))
