"""Ports that are only read are served behind the forward.

Between two matrix products a block's turn costs three times what it costs by itself: the products have pushed
everything that Python needs out of the processor's caches. Most blocks only read, though, and ask for the same ports in
step after step. So where nobody has edited what passes at a port, a step keeps a copy of it and goes on, and the blocks
have their turns one after the other when the forward is over, or when it comes to a port that cannot wait.

That the blocks will only read is a guess. If one does edit there, or asks for a port that has gone by, the forward runs
a second time: ports that were served already are not served again, but get what the blocks had left there, and all that
come behind are served where they are. Keys and values are written again as they were. A block cannot tell this from a
port that is served at once.

A forward is also run again if the model fails in it on what blocks have put there (a token id that it does not have),
without these blocks: other requests must not end with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from ..envoy.errors import PreemptedError, WriteError
from .hub import Hub
from .structure import map_tensors, tensors_of

if TYPE_CHECKING:
    from ..envoy.address import Port
    from .calls import ModuleCall
    from .mediator import Mediator
    from .values import Change
    from .windows import Share, Window

_MOST_BYTES = 16 << 20
"""What one forward may keep. Large values, those of prompts, cost more to copy than there is to gain."""

_REMEMBERED = 16
"""Forwards after which a port that nobody has asked for is forgotten."""

_LONGEST_PAUSE = 64
"""Forwards that are not tried after one that had to be run twice: one, then two, and so on up to this many."""

_NOTHING = object()


class DeferringHub(Hub):
    """A hub whose forwards may be run twice, since its model does the same then. The arguments are `Hub`'s.

    Attributes:
        deferred: forwards in which ports were served late.
        repeated: those of them that had to be run a second time.
    """

    def __init__(self, model: torch.nn.Module, call: ModuleCall | None = None, *, compiled: bool = False) -> None:
        super().__init__(model, call, compiled=compiled)
        self.deferred = 0
        self.repeated = 0
        self._number = 0
        self._asked: dict[Port, int] = {}
        self._first_turns = False
        self._pause = 0
        self._next_pause = 1
        self._tap: Callable[[Port, object], object] | None = None
        self._changes: list[tuple[Port, Window | None]] = []  # what was edited in the forward that runs, whose rows
        self._guess(frozenset())

    def begin(self, shares: Mapping[str, Share], without: Collection[str] = ()) -> None:
        """See `Hub`."""
        here = (self.mediators[request] for request in shares if request in self.mediators)
        self._first_turns = any(mediator.wait is None and not mediator.done for mediator in here)
        super().begin(shares, without)

    def run(self, forward: Callable[[], object]) -> object:
        """See `Hub`."""
        self._changes.clear()
        try:
            return self._run_first(forward)
        except Exception as error:
            if not self._changes:
                raise
            self._end_editors(error)
            return forward()

    def _run_first(self, forward: Callable[[], object]) -> object:
        self._number += 1
        self._guess(self._readable())
        output = self._run(forward) if self._kept else forward()
        for port in self.served:
            self._asked[port] = self._number
        return output

    def fire(self, port: Port, value: object) -> object:
        """See `Hub`."""
        if self._tap is None:
            return super().fire(port, value)
        if self._aside:
            return None
        try:
            return self._tap(port, value)
        except Exception as error:
            self.give_up(error)
            return None

    def _serve(self, waiting: list[Mediator], port: Port, value: object) -> list[Change]:
        changes = super()._serve(waiting, port, value)
        if changes:
            self._changes += [(port, window) for _, window in changes]
        return changes

    def _end_editors(self, error: Exception) -> None:
        """The model has failed on what blocks have put there: they end, and so do others that have yet to be served."""
        ports = {window: port for port, window in self._changes}
        waiting = {mediator.request for port in self.wanted for mediator in self._waiting.pop(port)}
        for request, share in self._shares.items():
            mediator = self.mediators.get(request)
            if mediator is None or (mediator.failure is not None and mediator.done):
                continue
            port = ports.get(share.rows)
            if port is not None:
                problem: Exception = WriteError(
                    f"the model failed on what this block had put in place of {port}, in step {mediator.step}: "
                    f"{type(error).__name__}: {error}. Other requests go on; put something there that the model can "
                    "work with."
                )
                problem.__cause__ = error
            elif request in waiting:
                problem = PreemptedError(
                    f"this trace had to end in step {mediator.step}: the model failed on what another request's block "
                    "had put there, and this step was run again without blocks."
                )
            else:
                continue
            self._end_with(mediator, request, problem)
        self._waiting = {
            port: [mediator for mediator in mediators if not mediator.done] for port, mediators in self._waiting.items()
        }

    def _guess(self, kept: frozenset[Port]) -> None:
        self._kept = kept  # ports whose blocks have their turns late
        self._passed: list[tuple[Port, object]] = []  # the ports that have fired, with the copies that are kept
        self._left: list[object] = []  # what blocks put in the place of the first of them, which were served
        self._pending: Counter[Port] = Counter()  # copies that were not served
        self._bytes = 0
        self._guessed_wrong = False
        self._repeats = 0

    def _readable(self) -> frozenset[Port]:
        """The ports that can be served late in the forward that begins."""
        if self.learned is None or self._recorder is not None or self._first_turns:
            return frozenset()
        if self._pause:
            self._pause -= 1
            return frozenset()
        self._asked = {port: last for port, last in self._asked.items() if self._number - last <= _REMEMBERED}
        kept = self._asked.keys() - self.replaced
        return frozenset() if kept.isdisjoint(self._waiting) else frozenset(kept)

    def _run(self, forward: Callable[[], object]) -> object:
        self.deferred += 1
        for port in self._kept:
            self._hooks.watch(port)
        try:
            self._tap = self._pass
            output = forward()
            self._catch_up(None)
            if self._guessed_wrong:
                self.repeated += 1
                self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
                self._tap = self._pass_again
                output = forward()
            else:
                self._next_pause = 1
        finally:
            self._tap = None
            self._guess(frozenset())
        return output

    def _pass(self, port: Port, value: object) -> object:
        """A port fires."""
        if self._guessed_wrong:
            return None
        if port in self._kept:
            self._bytes += sum(tensor.nbytes for tensor in tensors_of(value))
            if self._bytes <= _MOST_BYTES:
                self._passed.append((port, map_tensors(value, torch.clone)))
                self._pending[port] += 1
                return None
            self._kept = frozenset()
        replaced: object = None
        if (port in self._asked or port in self._waiting) and self._catch_up(port) and port in self._waiting:
            replaced = super().fire(port, value)
            self._left.append(replaced)
        self._passed.append((port, _NOTHING))
        return replaced

    def _catch_up(self, now: Port | None) -> bool:
        """Serve the ports that have fired, until the blocks are where the forward is.

        Args:
            now: the port that fires now; None if the forward is over.

        Returns:
            Whether they came there.
        """
        while not self._guessed_wrong and len(self._left) < len(self._passed):
            port, value = self._passed[len(self._left)]
            replaced: object = None
            if value is not _NOTHING:
                self._pending[port] -= 1
                replaced = super().fire(port, value)
            self._left.append(replaced)
            self._guessed_wrong = replaced is not None or self._gone_by(now)
        return not self._guessed_wrong

    def _gone_by(self, now: Port | None) -> bool:
        """Whether a block waits for a port that may have fired already, and of which there is no copy."""
        places = self.tree.places
        here = len(self.tree.order) if now is None else places.get(now, (len(self.tree.order),))[-1]
        for port in self.wanted:
            comes = self._pending[port] or port not in places or (port is now and len(places[port]) == 1)
            if not comes and places[port][0] <= here:
                return True
        return False

    def _pass_again(self, port: Port, value: object) -> object:
        """A port fires in the second run."""
        at = self._repeats
        if at == len(self._left):
            return super().fire(port, value)
        if self._passed[at][0] is not port:
            return None  # it has a hook only since it was asked for, which was further on
        self._repeats += 1
        return self._left[at]
