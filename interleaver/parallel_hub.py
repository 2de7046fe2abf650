"""The hub of one rank, where a model is split over several: all ranks run the same blocks.

The ranks exchange rows at ports, and modules that a block calls exchange more inside. Whoever is missing in such an
exchange is waited for without end, so nothing is exchanged that the ranks have not agreed upon. After every set of
turns (those of all blocks at one port, or at the beginning of a step) each rank says what its blocks do now: what they
wait for, how they ended, what they changed. Where that differs (an exception or a limit on one rank only, a block that
looked at the clock), the block ends on all of them, and everything else goes on. For the same reason a block does not
call a module in its turn: it hands over saying so, and the ranks call it together when they have agreed.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
import torch

from ..envoy.address import INPUT, OUTPUT, SAMPLES, Port, port_at
from ..envoy.errors import InternalError, LimitError, RanksError, UnsupportedError
from ..tracer.failure import Failure, describe, rebuild
from .calls import ModuleCall
from .generator import SEAT
from .group import shares
from .hub import Hub
from .mediator import Mediator
from .recorder import Recorder
from .shards import Shards, checksum
from .structure import tensors_of
from .values import Change, Held, Passing, copies
from .waits import BarrierWait, CallWait, StepWait
from .windows import Share, Window

_CALLS, _MORE, _FAILED = 1, 2, 4
"""What a rank says beside the states of its blocks: some wait for calls; more have come to the port that fires; its
hub has failed."""


class ParallelHub(Hub):
    """See the module.

    Args:
        model: this rank's part.
        shards: what its ports hold.
        call: as in `Hub`.
        compiled: as in `Hub`.
    """

    def __init__(
        self, model: torch.nn.Module, shards: Shards, call: ModuleCall | None = None, *, compiled: bool = False
    ) -> None:
        super().__init__(model, call, compiled=compiled)
        self._shards = shards
        self._ranks = shards.ranks
        self._turned: list[Mediator] = []
        self._edits: dict[str, int] = {}
        self._overs: dict[str, LimitError] = {}
        self._failure: str | None = None
        self._all_failed = False

    def add(self, request: str, mediator: Mediator, vocabulary: int | None) -> None:
        """See `Hub`."""
        super().add(request, mediator, vocabulary)
        mediator.caller = partial(self._ask, mediator)

    def remove(self, request: str) -> Mediator | None:
        """See `Hub`."""
        removed = super().remove(request)
        if not self.mediators:
            self._ranks.drop_room()
        return removed

    def begin(self, shares: Mapping[str, Share], without: Collection[str] = ()) -> None:
        """See `Hub`."""
        super().begin(shares, without)
        if type(self._recorder) is Recorder:
            self._recorder = _Recorder(self._shards)
            self._place.order = self._recorder.places

    def enter(self, requests: Iterable[str]) -> list[str]:
        """See `Hub`."""
        overs, self._overs = self._overs, {}
        for request, error in overs.items():
            if request in self.mediators:
                super().end_over(request, error)
        present = super().enter(requests)
        if self.mediators:
            self._settle()
        return present

    def left(self, request: str) -> None:
        """See `Hub`."""
        super().left(request)
        if self._turned:
            self._settle()

    def fire(self, port: Port, value: object) -> object:
        """See `Hub`."""
        waiting = self._waiting.get(port)
        replaced = super().fire(port, value)
        if self._waiting.get(port) is not waiting:  # whatever came of it, all ranks agree now
            self._settle()
        return replaced

    def forward_done(self) -> None:
        """See `Hub`."""
        super().forward_done()
        if self._turned:
            self._settle()

    def finish_step(self) -> None:
        """See `Hub`."""
        super().finish_step()
        if self._turned:
            self._settle()

    def end(self, request: str, result: object) -> None:
        """See `Hub`."""
        mediator = self.mediators[request]
        self._guarded(lambda: self._turn(mediator, partial(mediator.end, result)))
        self._settle()
        super().end(request, result)

    def end_over(self, request: str, error: LimitError) -> None:
        """See `Hub`; maybe on this rank only, so it is done where all agree next."""
        self._overs[request] = error

    def abandon_step(self) -> None:
        """See `Hub`."""
        super().abandon_step()
        self._turned.clear()
        self._edits.clear()

    def give_up(self, error: Exception) -> None:
        """See `Hub`; the other ranks learn of it when all agree next."""
        self._failure = f"{type(error).__name__}: {error}"
        super().give_up(error)

    # --- turns

    def _serve(self, waiting: list[Mediator], port: Port, value: object) -> list[Change]:
        turns: list[tuple[Mediator, Held, Window | None]] = []
        served = 0
        while True:
            rest = waiting[served:]
            one_by_one = sum(map(shares, rest)) > 1  # a call hands over, and the next one must wait
            batch = [mediator for mediator in (rest[:1] if one_by_one else rest) if not mediator.done]
            served += 1 if one_by_one else len(rest)
            if batch:
                self._give_turns(batch, port, value, turns)
            more = len(waiting) > served
            if not self._answer_calls(more=more):
                if not more:
                    break
                self._agree(more=True)  # whose rows are gathered next
        return self._shards.cut(value, self._changes(turns, port), port)

    def _give_turns(
        self,
        batch: list[Mediator],
        port: Port,
        value: object,
        turns: list[tuple[Mediator, Held, Window | None]],
    ) -> None:
        """The turns of blocks at a port, whose rows are gathered together."""
        windows = [m.share.last if self._place.sampling else m.share.rows for m in batch]
        try:
            whole, places = self._shards.whole_rows(value, windows, port)
            made, versions = copies(whole, places, port)
        except UnsupportedError as error:
            for mediator in batch:
                self._turn(mediator, partial(mediator.fail, error))
            return
        passing = Passing(whole, port)
        for mediator, copy, window, place in zip(batch, made, windows, places, strict=True):
            if port.kind == SAMPLES:
                passing = Passing(whole, port, self._vocabulary, mediator.fixed_samples)
            held = Held(copy, versions, place, passing)
            mediator.at_port(port, held)
            self._went_on(mediator)
            turns.append((mediator, held, window))

    def _changes(self, turns: list[tuple[Mediator, Held, Window | None]], port: Port) -> list[Change]:
        changes: list[Change] = []
        for mediator, held, window in turns:
            changed = held.changed
            if changed is not None and mediator.failure is None:
                self.edited.add(mediator.request)
                mediator.edited = mediator.edited or not port.of_step
                changes.append((changed, window))
                self._edits[mediator.request] = checksum(changed)
        return changes

    def _went_on(self, mediator: Mediator) -> None:
        self._turned.append(mediator)
        super()._went_on(mediator)

    # --- calls

    def _answer_calls(self, *, more: bool = False) -> bool:
        """Call the modules that blocks wait for; whether there were any."""
        calling = [m for m in dict.fromkeys(self._turned) if isinstance(m.wait, CallWait)]
        if not calling:
            return False
        for mediator in calling:
            self._make_part(mediator)
        self._agree(more=more)
        for mediator in sorted(calling, key=attrgetter("request")):
            wait = mediator.wait
            if isinstance(wait, CallWait):  # it is still there
                try:
                    turn = partial(mediator.answer, wait, self._called(wait))
                except Exception as error:
                    turn = partial(mediator.answer, wait, None, error)
                self._turn(mediator, turn)
        return True

    def _make_part(self, mediator: Mediator) -> None:
        """Make this rank's part of what a module is called with; whoever cannot says so before any rank calls it."""
        wait = mediator.wait
        assert isinstance(wait, CallWait), "it waits for a call"
        try:
            wait.part = self._shards.part(wait.arguments, port_at(wait.address, INPUT))
        except Exception as error:
            wait.problem = error

    def _ask(self, mediator: Mediator, address: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run by a block: have a module called, while it stays at its port."""
        wait, mediator.held = CallWait(address, (args, kwargs), mediator.port, mediator.held), None
        return mediator.hand_over(wait)

    def _called(self, wait: CallWait) -> object:
        if wait.problem is not None:
            raise wait.problem
        return self._shards.whole(self.calls.call(wait.address, *wait.part), port_at(wait.address, OUTPUT))

    # --- agreements

    def _settle(self) -> None:
        """Agree, until no block of any rank waits for a call."""
        try:
            while not self._all_failed and (self._answer_calls() or self._agree() or self._turned):
                pass
        except Exception as error:
            self.give_up(error)
            self._agree()  # so that the others hear of it
        self._all_failed = False
        if self._draws.may or self._place.sampling:
            SEAT.leave()

    def _agree(self, *, more: bool = False) -> bool:
        """Hear what the blocks of all ranks do now, and end those that do not do the same.

        Args:
            more: blocks have come to the port that fires, and are to be served there.

        Returns:
            Whether some rank goes on before all are at one.
        """
        turned, self._turned = dict.fromkeys(self._turned), []
        states = {mediator.request: _state(mediator) for mediator in turned}
        calls = any(isinstance(mediator.wait, CallWait) for mediator in turned)
        flags = _CALLS * calls | _MORE * more | _FAILED * (self._failure is not None)
        said = self._ranks.exchange((flags, _sum(states), _sum(self._edits)))
        every = 0
        for flag, *_ in said:
            every |= flag
        if every & _FAILED:
            failures = [failure for failure in self._ranks.exchange_any(self._failure) if failure is not None]
            if self._failure is None:
                super().give_up(InternalError(f"the hub of another rank has failed: {failures[0]}"))
            self._failure, self._all_failed = None, True
            self._turned.clear()
            self._edits.clear()
            return False
        if len({states_sum for _, states_sum, _ in said}) > 1:
            self._compare(states, turned)
        if every:
            return True  # some ranks have yet to see what was edited
        if len({edits_sum for *_, edits_sum in said}) > 1:
            self._compare(
                {request: f"it wrote values with the sum {edits:08x}" for request, edits in self._edits.items()}
            )
        self._edits.clear()
        return False

    def _compare(self, states: Mapping[str, str], turned: Iterable[Mediator] = ()) -> None:
        """Find the blocks that do not do the same on all ranks, and end them."""
        failures = {mediator.request: _failure(mediator) for mediator in turned}
        mine = {request: (state, failures.get(request)) for request, state in states.items()}
        said: list[dict[str, tuple[str, bytes | None]]] = self._ranks.exchange_any(mine)
        for request in dict.fromkeys(request for one in said for request in one):
            found = [one.get(request, ("it has had no turn", None)) for one in said]
            if len({state for state, _ in found}) > 1:
                raised = [failure for _, failure in found if failure is not None]
                self._end_differing(request, [state for state, _ in found], raised)

    def _end_differing(self, request: str, states: list[str], failures: list[bytes]) -> None:
        mediator = self.mediators.get(request)
        if mediator is None:
            return
        if mediator.failure is None or not mediator.done:
            error: Any = RanksError(
                "the block did not do the same on all ranks of the engine: "
                + "; ".join(f"on rank {rank}, {state}" for rank, state in enumerate(states))
                + ". It runs on each of them, with the same values and random numbers. What differs from process to "
                "process (the time, ids of objects and processes, files) must not decide what it asks for, calls or "
                "writes."
            )
            if failures:
                error = rebuild(msgspec.msgpack.decode(failures[0], type=Failure))
            mediator.drop(error)
        for port, waiting in [*self._waiting.items()]:
            if mediator in waiting:
                waiting.remove(mediator)
                if not waiting:
                    del self._waiting[port]
        self._done.discard(request)
        self.ended.add(request)
        self.edited.add(request)  # maybe by a rank that had its turn before it heard of this
        self._meetings.see_end(mediator)


class _Recorder(Recorder):
    """Notes the shapes of the whole."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self._shards = shards

    def note(self, port: Port, value: object, rows: int | None) -> None:
        """See `Recorder`."""
        if port.kind == OUTPUT:
            with suppress(UnsupportedError):  # then its part is shown
                value = self._shards.outline(value, port)
        super().note(port, value, rows)


def _state(mediator: Mediator) -> str:
    """What a block does now, in words that are the same on all ranks if it is."""
    wait = mediator.wait
    if mediator.done:
        if mediator.failure is not None:
            return f"it raised {type(mediator.failure).__name__}"
        return "it stopped" if mediator.stopped else "it ended"
    if isinstance(wait, Port):
        return f"it waits for {wait}"
    if isinstance(wait, StepWait):
        return f"it waits for step {wait.step}"
    if isinstance(wait, BarrierWait):
        return "it waits at a barrier"
    if isinstance(wait, CallWait):
        shapes = [[*tensor.shape] for tensor in tensors_of(wait.arguments)]
        problem = f", which fails with {type(wait.problem).__name__}" if wait.problem is not None else ""
        return f"it calls {wait.address} with {shapes}{problem}"
    return "it waits for the end of its request"


def _failure(mediator: Mediator) -> bytes | None:
    return None if mediator.failure is None else msgspec.msgpack.encode(describe(mediator.failure))


def _sum(said: Mapping[str, object]) -> int:
    return zlib.crc32(repr(said).encode())
