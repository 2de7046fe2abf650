"""Where the blocks of all requests meet the one forward of a model.

The engine tells the hub when a step begins, which rows belong to whom, when logits and samples are there, and when
the step is over; hooks tell it which port fires. The hub gives each block that waits its copy and its turn, and puts
edits back. An exception of a block ends that block's request and nothing else; an exception of the hub itself ends
all blocks with `InternalError`, and the forward goes on untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from functools import partial
from operator import attrgetter
from threading import get_ident

import torch

from ..envoy.address import Port
from ..envoy.errors import InternalError, LimitError, UnsupportedError
from ..envoy.tree import Learned, ModuleTree
from .calls import Calls, ModuleCall
from .generator import SEAT, Draws
from .group import shares as shares_something
from .hooks import Hooks
from .mediator import Mediator
from .port_turns import PortTurns
from .recorder import Recorder
from .supply import Supply
from .values import put_rows
from .waits import BarrierWait, StepWait
from .windows import Share, due_rows

_index = attrgetter("index")


class Hub(PortTurns):
    """The blocks that run on one model.

    Args:
        model: the model whose modules can be reached.
        call: how to call a module on a block's own values, where that is not ``module(*args, **kwargs)``.
        compiled: forwards in which no block waits for a module may run on a compiled model, where no hook is called.

    Attributes:
        tree: the model's modules, with the order once learned.
        served: ports of modules that were waited for when they fired in this step.
        replaced: ports of modules at which some block has put something else, since no block was there.
        learned: order and shapes of the ports, once a step was recorded.
        calls: modules that run for a block or the engine, with no port firing.
    """

    def __init__(self, model: torch.nn.Module, call: ModuleCall | None = None, *, compiled: bool = False) -> None:
        super().__init__()
        self.tree = ModuleTree.of(model)
        self.served: set[Port] = set()
        self.replaced: set[Port] = set()
        self._compiled = compiled
        self._draws = Draws(model)
        self._hooks = Hooks(model, self.fire)
        self.calls = Calls(self._hooks.module, call)
        self._shares: Mapping[str, Share] = {}
        self._steps: dict[str, int] = {}
        self._recorder: Recorder | None = None
        self.learned: Learned | None = None

    # --- requests

    def add(self, request: str, mediator: Mediator, vocabulary: int | None) -> None:
        """Take in the block of a request, whose first step brings its first turn; `vocabulary` bounds its tokens."""
        self._vocabulary = vocabulary
        if not self.mediators:
            self._draws.look()
        self.mediators[request] = mediator
        mediator.request = request
        mediator.place = self._place
        mediator.caller = self.calls.call
        if shares_something(mediator):
            self._meeting[request] = mediator

    def remove(self, request: str) -> Mediator | None:
        """Forget a request; its block ends if it still runs."""
        mediator = self.mediators.pop(request, None)
        self._meeting.pop(request, None)
        self._steps.pop(request, None)
        self.ended.discard(request)
        self._done.discard(request)
        if mediator is not None:
            if not mediator.done:
                mediator.drop(InternalError("the request was dropped before its block had ended."))
            self._guarded(lambda: self._meetings.see_end(mediator))
            SEAT.leave()
        if not self.mediators:
            self._hooks.clear()
            self.replaced.clear()
        return mediator

    def left(self, request: str) -> None:
        """The request has left the engine: its block gets no step any more, so others need not wait for it."""
        self.mediators[request].left = True
        self._guarded(lambda: self._meetings.see_end(self.mediators[request]))

    def end(self, request: str, result: object) -> None:
        """The request has ended with `result`: run its block to the end."""
        mediator = self.mediators[request]
        self._guarded(lambda: mediator.end(result))
        if not mediator.done:
            mediator.drop(InternalError("the block did not end with its request."))
        self._guarded(lambda: self._meetings.see_end(mediator))
        SEAT.leave()

    # --- one step

    def begin(self, shares: Mapping[str, Share], without: Collection[str] = ()) -> None:
        """A step of the model begins; blocks that start now or waited for it get their turn.

        Args:
            shares: whose rows are where.
            without: requests whose blocks get none, or get it later (`enter`).
        """
        self._shares = shares
        self.served.clear()
        self._place.begin(shares)
        self._thread = get_ident()
        present = self.enter(request for request in shares if request not in without)
        if self.learned is None and present and (self.needs_modules or not self._compiled):
            SEAT.leave()
            self._recorder = Recorder()
            self._place.order = self._recorder.places
            self._draws.watch()
            self._hooks.watch_all()
        if self._draws.may:
            SEAT.leave()

    def enter(self, requests: Iterable[str]) -> list[str]:
        """The blocks of these requests get their turn at the beginning of the step that has begun, in invoke order."""
        present = sorted((key for key in requests if key in self.mediators), key=lambda key: self.mediators[key].index)
        for request in present:
            self._guarded(partial(self._begin, request, self._shares[request]))
        if self._place.sampling:
            SEAT.leave()
        return present

    def run(self, forward: Callable[[], object]) -> object:
        """Run the forward of a step, in which blocks have their turns at modules."""
        return forward()

    def pad(self, total: int) -> None:
        """The tensors of this step have `total` rows, some of them behind those of all requests."""
        if self._rows() in (None, total):
            return
        self._shares = {request: share.padded(total) for request, share in self._shares.items()}
        for mediator in self.mediators.values():
            mediator.share = mediator.share.padded(total)

    def forward_done(self) -> None:
        """The forward is over: from here on each request has one row, for logits and samples."""
        self._place.forward_done()
        for port, _ in [*self._place.doubts]:
            self._miss(port)
        SEAT.leave()
        self._draws.see()

    def fire(self, port: Port, value: object) -> object:
        """A port fires: give it to the blocks that wait for it. Nothing fires for modules that other threads run.

        Returns:
            What the model should go on with, or None if nobody changed it.
        """
        place = self._place
        if self._aside:
            return None
        if self._recorder is not None and not port.of_step:
            self._recorder.note(port, value, self._rows())
        waiting, supply = self._waiting.pop(port, None), place.supply
        if waiting is None:
            if supply is None or supply.at not in supply.edits:
                return None
            waiting = []
        place.at(port)
        if not port.of_step:
            self.served.add(port)
        if len(waiting) > 1:
            waiting.sort(key=_index)
        replaced: object = None
        self._firing, place.firing = waiting, True
        try:
            changes = self._serve(waiting, port, value)
            if supply is not None:
                changes += supply.edits.pop(supply.at, ())
            if changes:
                replaced = put_rows(value, changes, port)
                self.replaced.add(port)
        except Exception as error:
            self.give_up(error)
        self._firing, place.firing = [], False
        if self._draws.may or place.sampling:
            SEAT.leave()
        return replaced

    def supply(self, supply: Supply, late: Iterable[str] = ()) -> None:
        """The forward has passed some ports, and the blocks that wait there have their turns now, until `end_supply`.

        Args:
            supply: what has passed. Each of its ports has to `fire`, in order.
            late: requests whose blocks have yet to begin the step.
        """
        shares = {self.mediators[request]: self._shares[request] for request in late if request in self.mediators}
        self._guarded(partial(supply.begin, self._waiting, shares))
        self._place.supply = supply

    def end_supply(self) -> None:
        """All of them have fired, or the forward runs again."""
        if self._place.supply is not None:
            self._place.supply.end()
        self._place.supply = None

    def finish_step(self) -> None:
        """The step is over: blocks that still wait for one of its ports get an error. Hooks stay for the next step."""
        self._place.end()
        while self._waiting:
            self._miss(next(reversed(self._waiting)))
        if self._recorder is not None or all(mediator.done for mediator in self.mediators.values()):
            self._hooks.clear()
        SEAT.leave()
        self._draws.see()
        if self._recorder is not None:
            self.learned, self._recorder = self._recorder.learned(), None
            self.tree.learn(self.learned)
            self._place.learn(self.tree.places)

    def end_over(self, request: str, error: LimitError) -> None:
        """End a block that is over a limit, between two steps."""
        mediator = self.mediators[request]
        mediator.over(error)
        self._guarded(lambda: self._end_with(mediator, request, error))

    def abandon_step(self) -> None:
        """The engine failed in this step: forget the step without running blocks."""
        self._place.end()
        self._firing, self._place.firing = [], False
        self._waiting.clear()
        self._hooks.clear()
        SEAT.leave()
        self._recorder = None
        self._draws.forget()
        self._place.order = self.tree.places

    # --- inside

    def _begin(self, request: str, share: Share) -> None:
        mediator = self.mediators[request]
        if mediator.done and not mediator.edited:
            return
        expected = self._steps.get(request, -1) + 1
        if share.step != expected:
            try:
                due = due_rows(share, expected, partial_prompt=mediator.partial_prompt, edited=mediator.edited)
            except UnsupportedError as error:
                self._end_with(mediator, request, error)
                return
            if due is None:
                self._shares = self._place.requests = {key: it for key, it in self._shares.items() if key != request}
                return
            share = due
        self._steps[request] = expected
        if mediator.done:
            return
        mediator.share, mediator.apart = share, False
        if isinstance(mediator.wait, BarrierWait):
            assert mediator.member is not None, "there are barriers in a group only"
            why = f"its request went on to step {expected} without it, as the engine did not hold it back"
            self._end_with(mediator, request, mediator.member.unmet(mediator.wait.barrier, why))
            return
        if mediator.wait is None:
            self._turn(mediator, mediator.go_on)
        elif isinstance(mediator.wait, StepWait) and mediator.wait.step == expected:
            self._turn(mediator, lambda: mediator.at_step(expected))

    def _miss(self, port: Port) -> None:
        """A port does not come any more for the blocks that wait for it."""
        for mediator in self._waiting.pop(port, ()):
            error = self._place.missed(port, mediator, port in self.tree.places, self._hooks.fires_as(port))
            self._guarded(partial(self._turn, mediator, partial(mediator.fail, error)))

    def _end_with(self, mediator: Mediator, request: str, error: Exception) -> None:
        if not mediator.done and mediator.wait is not None:
            self._turn(mediator, lambda: mediator.fail(error))
        if not mediator.done or mediator.failure is None:
            mediator.drop(error)
        self.ended.add(request)
        self._meetings.see_end(mediator)

    def meets_inside(self, address: str) -> bool:
        """Whether blocks may meet what is inside of a module, or it is not the engine's step that runs it."""
        return address in self._hooks.within or self.calls.inside or get_ident() != self._thread

    @property
    def _aside(self) -> bool:
        """Whether what runs now is none of the blocks' business."""
        return self._place.over or self.calls.inside or get_ident() != self._thread

    def _empty_when_idle(self) -> dict[str, Sized]:
        return super()._empty_when_idle() | {"hooks": self._hooks, "steps": self._steps}

    def _rows(self) -> int | None:
        window = next(iter(self._shares.values())).rows
        return window.total if window is not None else None
