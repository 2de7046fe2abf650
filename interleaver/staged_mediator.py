"""A block of one pipeline stage; see `stages.py`."""

from __future__ import annotations

import torch

from ..envoy.address import SAMPLES, Port, port_at
from ..envoy.errors import PortError, UnsupportedError
from .mediator import Mediator
from .modes import State
from .stages import CALL, Entry, Script
from .structure import map_tensors
from .values import Held, Passing
from .waits import EndWait, StepWait, Wait


class StagedMediator(Mediator):
    """A mediator that goes over what its block has read in other stages.

    Attributes:
        script: what it reads in this and other stages.
        vocabulary: how many token ids there are.
        shares: other blocks can tell the order of its turns.
        told_end: the stages before the last one were told of the step in which it has ended.
    """

    script: Script
    vocabulary: int | None
    shares = False
    told_end = False
    _told: Exception | None = None
    _at: Entry | None = None
    """What was noted of the port that it is at."""

    def at_port(self, port: Port, held: Held, now: State | None = None) -> None:
        """See `Mediator`."""
        self._at = self.script.note(port, held.value)
        super().at_port(port, held, now)

    def told(self, port: Port) -> None:
        """Its turn when it is told what a later stage has read at the port that it waits for."""
        try:
            entry = self.script.next(port)
        except Exception as error:
            self._told = error
            self.fail(error)
            return
        assert entry is not None, "there is something to tell"
        self._take(port, entry)
        self._turn(None)

    def call(self, address: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """See `Mediator`; where another stage has the module, its result comes from there."""
        self._over()
        port = port_at(address, CALL)
        if (entry := self.script.next(port)) is not None:
            return entry.value
        if not self.script.places.here(address):
            before = self.port, self.held, self._at
            try:
                self.hand_over(port)
                return self.held.value  # type: ignore[union-attr]  # it was told
            finally:
                self.port, self.held, self._at = before
        try:
            result = super().call(address, args, kwargs)
        except Exception as error:
            self.script.refuse(port, error)
            raise
        self.script.note(port, result)
        return result

    def hand_over(self, wait: Wait) -> object:
        """See `Mediator`."""
        self._depart()
        if isinstance(wait, StepWait | EndWait):
            self.script.check_over(ends=False)
        return super().hand_over(wait)

    def _go(self, port: Port, asks: int | None = None) -> None:
        if not self._ended:
            if self._turns.checked:
                self._turns.check()
            self._depart()
            if self.shares and self.script.given:  # the hub has the blocks take turns as they did before
                self.hand_over(port)
                return
            if (entry := self.script.next(port)) is not None:
                self._take(port, entry)
                return
        try:
            super()._go(port, asks)
        except (PortError, UnsupportedError) as error:
            if error is not self._told:
                self.script.refuse(port, error)
            raise

    def _take(self, port: Port, entry: Entry) -> None:
        """Be at a port of another stage."""
        passing = map_tensors(entry.value, torch.Tensor.detach)  # the block may change the shape of what it holds
        limit, fixed = (self.vocabulary, self.fixed_samples) if port.kind == SAMPLES else (None, None)
        held = Held(entry.value, None, None, Passing(passing, port, limit, fixed))
        self.port, self.held, self._at = port, held, entry

    def _leave_last(self) -> None:
        self._depart()
        self.script.check_over(ends=True)

    def _depart(self) -> None:
        """See what it has changed at its port, here and in the stage that has the port."""
        if self.held is None or self._at is None:
            return
        self.held.settle(self.bounds)
        if self.held.changed is not None:
            self.edited = self.edited or (self.port is not None and not self.port.of_step)
        self.script.leave(self._at, self.held.changed or ())
