"""Where the blocks of all requests meet the one forward of a model.

The engine tells the hub when a step begins, which rows belong to whom, when logits and samples are there, and when
the step is over; hooks tell it which port fires. The hub gives each block that waits its copy and its turn, and puts
edits back. An exception of a block ends that block's request and nothing else; an exception of the hub itself ends
all blocks with `InternalError`, and the forward goes on untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from threading import get_ident

import torch

from ..envoy.address import SAMPLES, Port
from ..envoy.errors import InternalError, PortNotReachedError, UnsupportedError
from ..envoy.tree import Learned, ModuleTree
from .generator import SEAT, draws, states
from .hooks import Hooks
from .mediator import Mediator
from .meetings import Meetings
from .modes import Outside
from .place import Place
from .recorder import Recorder
from .values import Change, Held, copies, map_tensors, put_rows
from .waits import BarrierWait, EndWait, StepWait
from .windows import Share, broken

ModuleCall = Callable[[torch.nn.Module, "tuple[object, ...]", "dict[str, object]"], object]

_index = attrgetter("index")
_rows, _last = attrgetter("share.rows"), attrgetter("share.last")


class Hub:
    """The blocks that run on one model.

    Args:
        model: the model whose modules can be reached.
        call: how to call a module on a block's own values, where that is not ``module(*args, **kwargs)``.
        compiled: forwards in which no block waits for a module may run on a compiled model, where no hook is called.

    Attributes:
        tree: the model's modules, with the order once learned.
        mediators: the blocks by request.
        ended: requests whose block ended them (by an exception or `stop`) and that the engine has yet to end.
        edited: requests whose block changed what the model computes; the engine takes them out once they are gone.
    """

    def __init__(self, model: torch.nn.Module, call: ModuleCall | None = None, *, compiled: bool = False) -> None:
        self.tree = ModuleTree.of(model)
        self.mediators: dict[str, Mediator] = {}
        self.ended: set[str] = set()
        self.edited: set[str] = set()
        self._grouped: dict[str, Mediator] = {}
        self._done: set[str] = set()
        self._modules = [*model.modules()]
        self._compiled = compiled
        self._drew = self._draws = True
        self._random: list[bytes] | None = None
        self._hooks = Hooks(model, self.fire)
        self._call_module = call or (lambda module, args, kwargs: module(*args, **kwargs))
        self._vocabulary: int | None = None
        self._waiting: dict[Port, list[Mediator]] = {}
        self._firing: list[Mediator] = []
        self._meetings = Meetings(self._turn)
        self._shares: Mapping[str, Share] = {}
        self._steps: dict[str, int] = {}
        self._recorder: Recorder | None = None
        self._place = Place()
        self._learned: Learned | None = None
        self._inside = False
        self._thread = get_ident()

    # --- requests

    def add(self, request: str, mediator: Mediator, vocabulary: int | None) -> None:
        """Take in a block; its first turn comes with the first step of its request.

        Args:
            request: id of the request.
            mediator: the block.
            vocabulary: size of the model's vocabulary, the bound of the token ids that it may write.
        """
        self._vocabulary = vocabulary
        self._draws = self._drew or draws(self._modules)
        self.mediators[request] = mediator
        mediator.request = request
        mediator.place = self._place
        mediator.caller = self._call
        if mediator.member is not None:
            self._grouped[request] = mediator

    def remove(self, request: str) -> Mediator | None:
        """Forget a request; its block ends if it still runs."""
        mediator = self.mediators.pop(request, None)
        self._grouped.pop(request, None)
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
        return mediator

    def end(self, request: str, result: object) -> None:
        """The request has ended with `result`: run its block to the end."""
        mediator = self.mediators[request]
        self._guarded(lambda: mediator.end(result))
        if not mediator.done:
            mediator.drop(InternalError("the block did not end with its request."))
        self._guarded(lambda: self._meetings.see_end(mediator))
        SEAT.leave()

    @property
    def held(self) -> frozenset[str]:
        """Requests whose block waits at a barrier: the engine must not go on with them."""
        return frozenset(key for key, mediator in self._grouped.items() if isinstance(mediator.wait, BarrierWait))

    def take_done(self) -> frozenset[str]:
        """Requests that go on, and whose blocks have come to need no more steps since this was last asked."""
        done, self._done = frozenset(self._done), set()
        return done

    @property
    def learned(self) -> Learned | None:
        """Order and shapes of the ports, once a step was recorded."""
        return self._learned

    def check_integrity(self) -> None:
        """Assert that nothing is left behind when no request is running.

        Raises:
            InternalError: it names what is left.
        """
        left = {
            "hooks": len(self._hooks),
            "blocks": len(self.mediators),
            "waiting ports": len(self._waiting),
            "requests to end": len(self.ended),
            "steps": len(self._steps),
        }
        if any(left.values()):
            raise InternalError(f"left behind by an idle model: { ({k: v for k, v in left.items() if v}) }.")

    # --- one step

    def begin(self, shares: Mapping[str, Share]) -> None:
        """A step of the model begins; blocks that start now or waited for it get their turn."""
        self._shares = shares
        self._place.begin(shares)
        self._thread = get_ident()
        present = [(request, share) for request, share in shares.items() if request in self.mediators]
        present.sort(key=lambda item: self.mediators[item[0]].index)  # blocks of one trace, in their order
        for request, share in present:
            self._guarded(lambda request=request, share=share: self._begin(request, share))  # type: ignore[misc]
        if self._learned is None and present and (self.needs_modules or not self._compiled):
            SEAT.leave()
            self._recorder = Recorder()
            self._place.order = self._recorder.places
            self._random = states()
            self._hooks.watch_all()
        if self._draws:
            SEAT.leave()

    @property
    def needs_modules(self) -> bool:
        """Whether a block waits for a module in this step. If not, the forward may run without hooks."""
        return any(not port.of_step for port in self._waiting)

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
        SEAT.leave()
        self._see_draws()

    def fire(self, port: Port, value: object) -> object:
        """A port fires: give it to the blocks that wait for it.

        Returns:
            What the model should go on with, or None if nobody changed it.

        Other threads may use the same modules in the meantime; nothing fires for them.
        """
        if self._inside or self._place.over or get_ident() != self._thread:
            return None
        if self._recorder is not None and not port.of_step:
            self._recorder.note(port, value, self._rows())
        waiting = self._waiting.pop(port, None)
        if waiting is None:
            return None
        self._place.at(port)
        if len(waiting) > 1:
            waiting.sort(key=_index)
        replaced: object = None
        self._firing, self._place.firing = waiting, True
        try:
            changes = self._serve(waiting, port, value)
            if changes:
                replaced = put_rows(value, changes, port)
        except Exception as error:
            self.give_up(error)
        self._firing, self._place.firing = [], False
        if self._draws or self._place.sampling:
            SEAT.leave()
        return replaced

    def finish_step(self) -> None:
        """The step is over: blocks that still wait for one of its ports get an error. Hooks stay for the next step."""
        self._place.end()
        while self._waiting:
            port, waiting = self._waiting.popitem()
            for mediator in waiting:
                self._guarded(lambda mediator=mediator, port=port: self._missed(mediator, port))  # type: ignore[misc]
        if self._recorder is not None or all(mediator.done for mediator in self.mediators.values()):
            self._hooks.clear()
        SEAT.leave()
        self._see_draws()
        if self._recorder is not None:
            self._learned, self._recorder = self._recorder.learned(), None
            self.tree.learn(self._learned)
            self._place.learned = True
            self._place.order = self.tree.places

    def abandon_step(self) -> None:
        """The engine failed in this step: forget the step without running blocks."""
        self._place.end()
        self._firing, self._place.firing = [], False
        self._waiting.clear()
        self._hooks.clear()
        SEAT.leave()
        self._recorder = self._random = None
        self._place.order = self.tree.places

    def give_up(self, error: Exception) -> None:
        """End every block with an `InternalError` that stands for `error`."""
        problem = error if isinstance(error, InternalError) else InternalError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error if problem is not error else None
        for request, mediator in self.mediators.items():
            if not mediator.done:
                mediator.drop(problem)
                self.ended.add(request)
        self._waiting.clear()
        SEAT.leave()

    # --- inside

    def _begin(self, request: str, share: Share) -> None:
        mediator = self.mediators[request]
        if mediator.done and not mediator.edited:
            return
        expected = self._steps.get(request, -1) + 1
        if share.step != expected:
            prefix = mediator.partial_prompt and not expected and share.ends_with(0)
            again = expected and not mediator.edited and share.step in (None, 0)
            if not prefix and not again:
                self._end_with(mediator, request, broken(share, expected))
                return
            if again:  # after a preemption, and nothing that is computed once more was edited
                if not share.ends_with(expected):
                    self._shares = {key: other for key, other in self._shares.items() if key != request}
                    self._place.requests = self._shares
                    return
                share = share.last_of(expected)
        self._steps[request] = expected
        if mediator.done:
            return
        mediator.share = share
        mediator.apart = False
        if isinstance(mediator.wait, BarrierWait):
            assert mediator.member is not None, "there are barriers in a group only"
            why = f"its request went on to step {expected} without it, as the engine did not hold it back"
            self._end_with(mediator, request, mediator.member.unmet(mediator.wait.barrier, why))
            return
        if mediator.wait is None:
            self._turn(mediator, mediator.start)
        elif isinstance(mediator.wait, StepWait) and mediator.wait.step == expected:
            self._turn(mediator, lambda: mediator.at_step(expected))

    def _end_with(self, mediator: Mediator, request: str, error: Exception) -> None:
        if not mediator.done and mediator.wait is not None:
            self._turn(mediator, lambda: mediator.fail(error))
        if not mediator.done or mediator.failure is None:
            mediator.drop(error)
        self.ended.add(request)
        self._meetings.see_end(mediator)

    def _serve(self, waiting: list[Mediator], port: Port, value: object) -> list[Change]:
        """The turns of blocks at a port, and what they change there.

        There will be more of them if one lets others go on at a barrier, and these ask for this port.
        """
        window_of = _last if self._place.sampling else _rows
        changes: list[Change] = []
        outside = Outside()
        served = 0
        while served < len(waiting):
            windows = [*map(window_of, waiting[served:])]
            try:
                made = copies(value, windows, port)
            except UnsupportedError as error:
                for mediator in waiting[served:]:
                    self._turn(mediator, partial(mediator.fail, error))
                return changes
            for copy, window in zip(made, windows, strict=True):
                mediator = waiting[served]
                served += 1
                held = Held(copy)
                if port.kind == SAMPLES:
                    held.limit, held.fixed = self._vocabulary, mediator.fixed_samples
                mediator.at_port(port, held, outside)
                self._went_on(mediator)
                if held.left_alone or mediator.failure is not None:
                    continue
                changed = held.changes()
                if changed is not None:
                    self.edited.add(mediator.request)
                    mediator.edited = mediator.edited or not port.of_step
                    changes.append((changed, window))
        return changes

    def _missed(self, mediator: Mediator, port: Port) -> None:
        known = port in self.tree.places or port.of_step
        why = "" if known else " The engine does not call this module as a module (or not in this mode)."
        error = PortNotReachedError(
            f"{port} did not come in step {mediator.step}: the module was not called.{why} "
            "Look at the model's tree for modules with output shapes; those were called."
        )
        self._turn(mediator, lambda: mediator.fail(error))

    def _turn(self, mediator: Mediator, turn: Callable[[], None]) -> None:
        """A block's turn, and what it waits for then."""
        turn()
        self._went_on(mediator)

    def _went_on(self, mediator: Mediator) -> None:
        """See what a block waits for now."""
        port = mediator.wait
        if isinstance(port, Port):
            if self._place.firing and port is self._place.port:
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

    def _call(self, address: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a module for a block, on copies, with no port firing."""
        inside, self._inside = self._inside, True
        try:
            copies = map_tensors((args, kwargs), torch.Tensor.clone)
            return self._call_module(self._hooks.module(address), *copies)  # type: ignore[misc]
        finally:
            self._inside = inside

    def _guarded(self, action: Callable[[], object]) -> object:
        """Run an action of the hub; its own errors end every block but never the engine."""
        try:
            return action()
        except Exception as error:
            self.give_up(error)
            return None

    def _see_draws(self) -> None:
        """Note whether the recorded forward drew random numbers of its own."""
        if self._random is not None:
            self._drew = self._random != states()
            self._draws = self._drew or draws(self._modules)
            self._random = None

    def _rows(self) -> int | None:
        window = next(iter(self._shares.values())).rows
        return window.total if window is not None else None
