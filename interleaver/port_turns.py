"""The turns of blocks at a port that fires, and where they go on to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from ..envoy.address import Port
from ..envoy.errors import UnsupportedError
from .blocks import Blocks
from .holding import hold, hold_each
from .hooks import Hooks
from .mediator import Mediator
from .meetings import Meetings
from .modes import state
from .place import Place
from .values import Change
from .waits import BarrierWait, EndWait, Wait

_rows, _last = attrgetter("share.rows"), attrgetter("share.last")


class PortTurns(Blocks):
    """Blocks that have turns at the ports of a model.

    What each further block at a port costs is paid for each request, so what can be done once for all of them is.
    """

    _hooks: Hooks

    def __init__(self) -> None:
        super().__init__()
        self._vocabulary: int | None = None
        self._firing: list[Mediator] = []
        self._meetings = Meetings(self._turn)
        self._place = Place()

    def _serve(self, waiting: list[Mediator], port: Port, value: object) -> list[Change]:
        """The turns of blocks at a port, and what they change there. More blocks may come meanwhile, from a barrier."""
        if len(waiting) > 1 or port.of_step or self._place.supply is not None:
            return self._serve_all(waiting, port, value)
        mediator = waiting[0]  # one block at a port of a module, as it mostly is: the same with less around it
        window = mediator.share.rows
        try:
            held = hold(value, window, port, mediator.asks)
        except UnsupportedError:
            return self._serve_all(waiting, port, value)
        mediator.at_port(port, held)
        self._went_on(mediator)
        changes: list[Change] = []
        if held.changed is not None and mediator.failure is None:
            self.edited.add(mediator.request)
            mediator.edited = True
            changes.append((held.changed, window))
        return changes if len(waiting) == 1 else changes + self._serve_all(waiting, port, value, 1)

    def _serve_all(self, waiting: list[Mediator], port: Port, value: object, served: int = 0) -> list[Change]:
        """As `_serve`, for any number of blocks at any port, of which the first `served` have had their turns."""
        place, supply = self._place, self._place.supply
        changes: list[Change] = []
        number = place.number
        window_of = _last if place.sampling else _rows
        while batch := waiting[served:]:
            served += len(batch)
            windows = [*map(window_of, batch)]
            try:
                holding = hold_each(batch, windows, value, port, supply, self._vocabulary)
            except UnsupportedError as error:
                for mediator in batch:
                    self._turn(mediator, partial(mediator.fail, error))
                continue
            now = state()  # a turn leaves it as it was
            to: Wait | None = None
            there: list[Mediator] | None = None
            for mediator, held, window in zip(batch, holding, windows, strict=True):
                mediator.at_port(port, held, now)
                if mediator.ran_on is not None:
                    self._come_back(mediator, port, number)
                wait = mediator.wait
                if wait is to and there is not None:  # where the one before has gone on to, as they mostly do
                    there.append(mediator)
                else:
                    self._went_on(mediator)
                    to, there = wait, self._waiting.get(wait) if type(wait) is Port else None
                if held.changed is not None and mediator.failure is None:
                    self.edited.add(mediator.request)
                    mediator.edited = mediator.edited or not port.of_step
                    changes.append((held.changed, window))
        return changes

    def _turn(self, mediator: Mediator, turn: Callable[[], None]) -> None:
        """A block's turn, and what it waits for then."""
        port, number = self._place.port, self._place.number
        turn()
        if mediator.ran_on is not None:
            self._come_back(mediator, port, number)
        self._went_on(mediator)

    def _come_back(self, mediator: Mediator, port: Port | None, number: int) -> None:
        """A block ran on in its turn. The others are at `port`."""
        supply = self._place.supply
        assert supply is not None, "there is nothing else to run on to"
        self._place.move(port, number)
        if supply.left(mediator):
            self.edited.add(mediator.request)

    def _went_on(self, mediator: Mediator) -> None:
        """See what a block waits for now."""
        port, place = mediator.wait, self._place
        if type(port) is Port:
            if port is place.port and place.firing:
                self._firing.append(mediator)
                return
            waiting = self._waiting.get(port)
            if waiting is not None:
                waiting.append(mediator)
            else:
                self._waiting[port] = [mediator]
                if not port.of_step:
                    self._hooks.watch(port)
        elif isinstance(port, BarrierWait):
            mediator.apart = True
            self._meetings.come(mediator, port)
        elif mediator.done:
            over = mediator.failure is not None or mediator.stopped
            (self.ended if over else self._done).add(mediator.request)
            self._meetings.see_end(mediator)
        elif isinstance(port, EndWait):
            self._done.add(mediator.request)
            self._meetings.see_end(mediator)
