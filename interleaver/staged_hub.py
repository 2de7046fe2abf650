"""The hub of one pipeline stage; see `stages.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from ..envoy.address import Port
from ..envoy.tree import Learned
from ..tracer.failure import describe
from .group import shares
from .hooks import Hooks
from .hub import Hub
from .mediator import Mediator
from .parallel_hub import ParallelHub
from .staged_mediator import StagedMediator
from .stages import CALL, Places, Script, Told, combined, decode, encode
from .windows import Share

if TYPE_CHECKING:
    from .ranks import Ranks


class _StageHooks(Hooks):
    """A block may ask for ports that this stage does not have."""

    def watch(self, port: Port) -> None:
        """See `Hooks`."""
        if port.address in self._modules and port.kind != CALL:
            super().watch(port)


class Staged(Hub):
    """In front of a hub's class.

    Attributes:
        places: which modules are where.
        stages: this stage and the others, for what is exchanged outside of steps.
    """

    places: Places
    stages: Ranks
    _clock: Iterator[int]
    _before: Learned | None = None
    _told_order = False

    def set_stage(self, model: torch.nn.Module, places: Places, stages: Ranks) -> None:
        """Called once, before all else."""
        self.places, self.stages, self._clock = places, stages, count()
        self.tree = places.tree
        self._hooks = _StageHooks(model, self.fire)

    def add(self, request: str, mediator: Mediator, vocabulary: int | None) -> None:
        """See `Hub`."""
        assert isinstance(mediator, StagedMediator), "blocks of a stage are launched as such"
        mediator.script, mediator.vocabulary = Script(self.places, self._clock), vocabulary
        mediator.shares = shares(mediator)
        super().add(request, mediator, vocabulary)

    @property
    def has_news(self) -> bool:
        """See `Blocks`; the last stage always has some for the others."""
        return True

    # --- what stages tell each other

    def hear(self, data: bytes) -> None:
        """What the stages before this one have read in the step that begins."""
        learned, blocks = decode(data, self._device())
        if learned is not None:
            self._before, self.learned = learned, combined(learned, self.learned)
        for request, told in blocks.items():
            mediator = self._staged(request)
            if mediator is not None:
                mediator.script.give(told.entries, back=False)
                mediator.script.failure, mediator.script.over = told.failure, told.over

    def hear_back(self, told: Mapping[str, bytes]) -> None:
        """What later stages have read in the last steps of requests; comes before `hear`."""
        if self.places.last:
            return
        self._catch_up({request: data for request, data in told.items() if request in self.mediators})
        self._after_turns()

    def tell(self) -> bytes:
        """For the next stage: what blocks have read in the step that is over here."""
        learned = self.learned if not self._told_order else None
        self._told_order = self.learned is not None
        try:
            return encode((learned, self._blocks()))
        except Exception as error:  # a value that cannot be sent
            self.give_up(error)
            return encode((learned, self._blocks(read=False)))

    def _blocks(self, *, read: bool = True) -> dict[str, Told]:
        blocks = {}
        for request in self._shares:
            mediator = self._staged(request)
            if mediator is not None:
                failure = describe(mediator.failure) if mediator.failure is not None else None
                blocks[request] = Told(mediator.script.read if read else [], failure, mediator.done)
        return blocks

    def tell_back(self) -> dict[str, bytes]:
        """For the stages before this one, which is the last: what blocks have read in this step.

        Those that have ended only where others may need what they have left in what they share.
        """
        told = {}
        for request in self._shares:
            mediator = self._staged(request)
            if mediator is None or (mediator.done and (mediator.told_end or not mediator.shares)):
                continue
            mediator.told_end = mediator.done
            if mediator.script.read:
                told[request] = encode(Told([entry for entry in mediator.script.read if entry.stage > 0]))
        return told

    def meet_at_end(self, request: str | None) -> None:
        """All stages, outside of a step: what the last one has read of a request that has ended.

        Args:
            request: none where the caller of this one needs nothing more of it.
        """
        mediator = self._staged(request) if request is not None else None
        mine = b""
        if self.places.last and mediator is not None:
            with suppress(Exception):  # a value that cannot be sent; the others must not wait for it
                mine = encode(Told(mediator.script.read))
        told = self.stages.exchange_any(mine)[-1]
        if request is not None and not self.places.last:
            if told:  # by the same rank of the last stage, so maybe not for all ranks of this one
                self._catch_up({request: told})
            self._after_turns()

    def _staged(self, request: str) -> StagedMediator | None:
        mediator = self.mediators.get(request)
        return mediator if isinstance(mediator, StagedMediator) else None

    def _catch_up(self, told: Mapping[str, bytes]) -> None:
        """Have blocks go over what later stages have read. Nothing is raised: other ranks would be kept waiting."""
        blocks = [mediator for request in told if (mediator := self._staged(request)) is not None]
        for mediator in blocks:
            self._guarded(partial(self._give_back, mediator, told[mediator.request]))
            if not mediator.shares and mediator.script.given and isinstance(mediator.wait, Port):
                self._guarded(partial(self._turn, mediator, partial(mediator.told, mediator.wait)))
        self._go_over(blocks)

    def _give_back(self, mediator: StagedMediator, data: bytes) -> None:
        mediator.script.give(decode(data, self._device()).entries, back=True)

    def _go_over(self, blocks: Iterable[StagedMediator]) -> None:
        """Have blocks that share something go over what they have read elsewhere, in the order in which they did."""
        sharing = [mediator for mediator in blocks if mediator.shares]
        while due := [mediator for mediator in sharing if mediator.script.given and isinstance(mediator.wait, Port)]:
            mediator = min(due, key=_next_given)
            port = mediator.wait
            assert isinstance(port, Port), "it is due"
            waiting = self._waiting.get(port, [])
            if mediator in waiting:
                waiting.remove(mediator)
            if not waiting:
                self._waiting.pop(port, None)
            self._guarded(partial(self._turn, mediator, partial(mediator.told, port)))

    def enter(self, requests: Iterable[str]) -> list[str]:
        """See `Hub`."""
        present = super().enter(requests)
        blocks = [mediator for request in present if (mediator := self._staged(request)) is not None]
        if any(mediator.shares for mediator in blocks):
            self._go_over(blocks)
            self._after_turns()
        return present

    # --- one step

    def begin(self, shares: Mapping[str, Share], without: Collection[str] = ()) -> None:
        """See `Hub`."""
        for request in shares:
            mediator = self._staged(request)
            if mediator is not None and not mediator.done:
                mediator.script.begin()
        super().begin(shares, without)

    def finish_step(self) -> None:
        """See `Hub`; what blocks still wait for may come in a later stage."""
        if not self.places.last:
            self._waiting.clear()
            for mediator in self.mediators.values():
                if mediator.streamed is not None:
                    mediator.streamed.take()
        known = self.learned
        super().finish_step()
        if self.learned is not known:
            self.learned = combined(self._before, self.learned)
        self.edited.update(request for request, mediator in self.mediators.items() if mediator.edited)

    def _after_turns(self) -> None:
        """Blocks have had turns outside of a step."""

    def _device(self) -> torch.device | None:
        parameters: Any = self._hooks.module("").parameters()
        return next((parameter.device for parameter in parameters), None)


def _next_given(mediator: StagedMediator) -> tuple[int, int]:
    """Where and when it has read what it is told next."""
    entry = mediator.script.given[0]
    return entry.stage, entry.order


class StagedHub(Staged, Hub):
    """Where every stage is one process."""


class StagedParallelHub(Staged, ParallelHub):
    """Where every stage is split over ranks, too."""

    def _after_turns(self) -> None:
        self._settle()
