"""Blocks that only read have their turns some steps later, several steps in one turn.

What a turn costs is handing over, and finding out who has which rows; what the block itself does is the least of it. A
block that reads the same ports in each step, with nothing in it that depends on a condition (`tracer.steady`), does not
care when it is told. So where all blocks of an engine are of that kind, and the batch has the same requests as in the
step before, a step only keeps what passes at their ports: from the memory of a graph in two or three copies, or as the
ports fire. After some steps the blocks have their turns, a few in each engine step, and each goes through all that was
kept without handing over.

They catch up at once when anything else happens: another batch, the end of a request, a call from the client. So nobody
can tell, except by the time.

That a block goes on as it did is a guess. If it edits after all, or stops, or asks for another port, that is too late:
the model has gone on without. The block then ends with the error that stands for a lost run (`PreemptedError`), and the
client runs the trace again, without delay. So only blocks are served like this whose client says that it can do so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING

import torch

from ..envoy.errors import LimitError, PreemptedError
from .deferring_hub import DeferringHub
from .kept_steps import Passed, Steps, pick
from .mediator import Mediator
from .steady_mediator import SteadyMediator
from .structure import map_tensors, tensors_of
from .values import is_flat
from .waits import EndWait

if TYPE_CHECKING:
    from ..envoy.address import Port
    from .calls import ModuleCall
    from .supply import Supply
    from .windows import Share

_STRAYED = (
    "this trace had to end: its block did something in a step that it had not done in those before (it edited, "
    "stopped, or asked for other ports), or the model did, when the engine had gone on without it."
)


class LaggingHub(DeferringHub):
    """A hub whose blocks may have their turns some steps later.

    Args:
        model, call, compiled: see `Hub`.
        graphs: steps with modules are kept if they are graphs (`passes`), whose modules are not called.

    Attributes:
        armed: all blocks would do with that in the next step.
        lagging: the step that runs is kept for them.
        passes: what the forward of this step had in memory that lasts, if it was one graph; None otherwise.
        kept: steps that were kept.
        strayed: blocks that had to be run again.
    """

    def __init__(
        self, model: torch.nn.Module, call: ModuleCall | None = None, *, compiled: bool = False, graphs: bool = False
    ) -> None:
        super().__init__(model, call, compiled=compiled)
        self._graphs = graphs
        self.armed = False
        self.passes: Supply | None = None
        self.kept = self.strayed = 0
        self._wanted: Mapping[Port, Sequence[int] | None] = {}  # the places of the items of a tuple; None for all
        self._blocks: list[tuple[SteadyMediator, int]] = []  # with their places in the batch
        self._behind: list[tuple[SteadyMediator, int]] = []  # those that have yet to go over `_last`
        self._past: list[str] = []  # requests in the batch whose blocks need no more steps, but still to count them
        self._running: Steps | None = None
        self._last: Steps | None = None
        self._spare: Steps | None = None
        self._modules = False
        self._moment = 0
        self._fired: list[Passed] = []  # in a forward that is kept as its ports fire
        self._fits = True

    # --- what the engine asks

    def lags(self, *, follows: bool) -> bool:
        """A step begins: whether it is kept for the blocks, which were `armed`.

        Args:
            follows: its requests are those of the last step, in the same order, each with one row, the next one.
        """
        self.lagging = self.armed and follows
        return self.lagging

    @property
    def needs_modules(self) -> bool:
        """See `Blocks`; in a step that is kept, whether ports of modules are."""
        return self._modules if self.lagging else super().needs_modules

    def waited_for(self, port: Port) -> bool:
        """See `Blocks`; in a step that is kept, whether what passes at the port is."""
        return port in self._wanted if self.lagging else super().waited_for(port)

    def keep(self, passed: Sequence[tuple[Port, object]]) -> None:
        """Keep what has passed in the forward of the step."""
        self._guarded(partial(self._keep, passed))

    def catch_up(self) -> None:
        """The blocks have their turns of all steps that were kept."""
        self.armed = self.lagging = False
        if self._blocks:
            last, self._last = self._last, None
            steps, self._running = self._running, None
            behind, self._behind = self._behind, []
            blocks, self._blocks = self._blocks, []
            for mediator, row in behind:
                self._guarded(partial(self._give, mediator, row, last))
            for mediator, row in blocks:
                self._guarded(partial(self._give, mediator, row, steps))
        self._forget()

    # --- the hub's own

    def begin(self, shares: Mapping[str, Share], without: Collection[str] = ()) -> None:
        """See `Hub`."""
        self.catch_up()
        self.passes = None
        super().begin(shares, without)

    def end(self, request: str, result: object) -> None:
        """See `Hub`."""
        self.catch_up()
        super().end(request, result)

    def left(self, request: str) -> None:
        """See `Hub`."""
        self.catch_up()
        super().left(request)

    def remove(self, request: str) -> Mediator | None:
        """See `Hub`."""
        self.catch_up()
        return super().remove(request)

    def end_over(self, request: str, error: LimitError) -> None:
        """See `Hub`."""
        self.catch_up()
        super().end_over(request, error)

    def pad(self, total: int) -> None:
        """See `Hub`."""
        if not self.lagging:
            super().pad(total)

    def run(self, forward: Callable[[], object]) -> object:
        """See `Hub`."""
        if not self.lagging:
            return super().run(forward)
        for port in self._wanted:
            if not port.of_step:
                self._hooks.watch(port)
        self._fired, self._fits = [], True
        output = forward()
        self._guarded(self._forward_kept)
        return output

    def fire(self, port: Port, value: object) -> object:
        """See `Hub`."""
        if not self.lagging:
            return super().fire(port, value)
        if port not in self._wanted:
            return None
        if port.of_step:
            self._guarded(partial(self._keep, [(port, value)]))
        elif not self.calls.inside and get_ident() == self._thread:
            self._guarded(partial(self._keep_one, port, value))
        return None

    def forward_done(self) -> None:
        """See `Hub`."""
        if not self.lagging:
            super().forward_done()

    def finish_step(self) -> None:
        """See `Hub`."""
        if self.lagging:
            self._guarded(self._step_kept)
            return
        super().finish_step()
        self._look()

    def abandon_step(self) -> None:
        """See `Hub`."""
        self._forget()
        super().abandon_step()

    def give_up(self, error: Exception) -> None:
        """See `Hub`."""
        self._forget()
        super().give_up(error)

    # --- inside

    def _forget(self) -> None:
        self.armed = self.lagging = self._modules = False
        self._wanted, self._blocks, self._behind, self._past = {}, [], [], []
        self._running = self._last = self._spare = None
        self._moment = 0

    def _look(self) -> None:
        """See whether the next step may be kept."""
        blocks: list[tuple[SteadyMediator, int]] = []
        past: list[str] = []
        wants: dict[Port, frozenset[int] | None] = {}
        for request, mediator in self.mediators.items():
            share = self._shares.get(request)
            if mediator.done or isinstance(mediator.wait, EndWait):
                past += [request] if share is not None else []
                continue
            if type(mediator) is not SteadyMediator or not mediator.ready or request in self.edited:
                return
            if share is None or share.rows is None or share.last is None or share.rows.length > 1:
                return
            blocks.append((mediator, share.last.start))
            for port in mediator.trail:
                mine, others = mediator.wants.get(port), wants.get(port, frozenset())
                wants[port] = None if mine is None or others is None else mine | others
        wanted = {port: None if items is None else sorted(items) for port, items in wants.items()}
        modules = {port: items for port, items in wanted.items() if not port.of_step}
        if blocks and (self._can_keep(modules) if modules else self._graphs):
            self._blocks, self._past, self._wanted, self._modules = blocks, past, wanted, bool(modules)
            self.armed = True

    def _can_keep(self, modules: Mapping[Port, Sequence[int] | None]) -> bool:
        if not self._graphs:  # as far as can be told before they fire
            return self.learned is not None and all(len(self.tree.places.get(port, ())) == 1 for port in modules)
        if self.passes is None or not modules.keys() <= {port for port, _ in self.passes.passed}:
            return False
        passed = [pick(port, value, modules[port]) for port, value in self.passes.passed if port in modules]
        return len(passed) == len(modules) and self._have_rows(passed)

    def _have_rows(self, passed: Sequence[Passed]) -> bool:
        """Whether these are tensors, or tuples of them, that have a row for each request."""
        values = [one.value for one in passed]
        rows = {tensor.shape[0] if tensor.ndim else 0 for value in values for tensor in tensors_of(value)}
        plain = all(isinstance(value, torch.Tensor) or is_flat(value) for value in values)
        return plain and len(rows) == 1 and rows.pop() >= len(self._shares)

    def _keep_one(self, port: Port, value: object) -> None:
        """Keep what passes at a port of a module, which fires."""
        steps, at = self._running, len(self._fired)
        if steps is None or not steps.moments:
            passed = pick(port, value, self._wanted[port])
            self._fired.append(passed._replace(value=map_tensors(passed.value, torch.clone)))
            return
        kept = steps.moments[0]
        self._fired.append(Passed(port, None, None))
        expected = at < len(kept.ports) and kept.ports[at] is port
        self._fits = self._fits and expected and kept.put_one(steps.count, port, value)

    def _forward_kept(self) -> None:
        """The forward of a step that is kept as its ports fire is over."""
        fired, self._fired = self._fired, []
        steps = self._running
        if steps is not None and steps.moments:
            self._moment = 1
            fits = self._fits and len(fired) == len(steps.moments[0].ports)
        else:
            modules = [port for port in self._wanted if not port.of_step]
            fits = len(fired) == len(modules) and self._have_rows(fired)
            if fits:
                self._keep_picked(fired)
        if not fits:  # the model does not do as in the steps before
            blocks = self._blocks
            self._count_past()
            self._forget()
            for mediator, _ in blocks:
                if not mediator.done:
                    self._lose(mediator)
                    self._went_on(mediator)

    def _keep(self, passed: Sequence[tuple[Port, object]]) -> None:
        wanted = self._wanted
        self._keep_picked([pick(port, value, wanted[port]) for port, value in passed if port in wanted])

    def _keep_picked(self, passed: Sequence[Passed]) -> None:
        if self._running is None:
            self._running = Steps()
        self._running.keep(self._moment, passed)
        self._moment += 1

    def _step_kept(self) -> None:
        """The step is over; some blocks have their turns of steps before."""
        steps, self._moment = self._running, 0
        assert steps is not None, "something is kept in each step"
        steps.count += 1
        self.kept += 1
        self._count_past()
        if steps.count == steps.room:
            self._go_over(len(self._behind))
            self._last, self._running, self._spare = steps, self._spare or Steps(), None
            self._behind = [*self._blocks]
        self._go_over(-(-len(self._blocks) // steps.room))

    def _count_past(self) -> None:
        """A step that is kept is over for those whose blocks are not given it: they see whether one comes again."""
        for request in self._past:
            self._steps[request] = self._steps.get(request, -1) + 1

    def _go_over(self, most: int) -> None:
        """Some of the blocks that are behind have their turns."""
        if self._last is None:
            return
        now, self._behind = self._behind[:most], self._behind[most:]
        for mediator, row in now:
            self._give(mediator, row, self._last)
        if not self._behind and self._last is not None:
            self._last.count, self._spare, self._last = 0, self._last, None

    def _give(self, mediator: SteadyMediator, row: int, steps: Steps | None) -> None:
        """A block has its turns of some steps."""
        if mediator.done or steps is None or not steps.count:
            return
        mediator.catch_up(steps.columns(mediator.trail, mediator.wants, row), steps.count)
        if mediator.strayed:
            self._lose(mediator)
        self._steps[mediator.request] = mediator.step
        mediator.habits = {number: (mediator.step, reads) for number, (_, reads) in mediator.habits.items()}
        if mediator.wait is None:  # it has ended
            self._went_on(mediator)

    def _lose(self, mediator: SteadyMediator) -> None:
        """A block has to run again."""
        self.strayed += 1
        mediator.failure = None
        mediator.drop(PreemptedError(_STRAYED))
