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
from .mediator import Mediator
from .steady_mediator import SteadyMediator
from .torch_compat import clone_each, inference_mode
from .values import map_tensors, tensors_of
from .waits import EndWait

if TYPE_CHECKING:
    from ..envoy.address import Port
    from .calls import ModuleCall
    from .supply import Supply
    from .windows import Share

_MOST_STEPS = 16
"""Steps that are kept before blocks have their turns."""

_MOST_BYTES = 64 << 20
"""What they may take; twice as much in all, since the next ones are kept while blocks go over the last."""

_STRAYED = (
    "this trace had to end: its block did something in a step that it had not done in those before (it edited, "
    "stopped, or asked for other ports), or the model did, when the engine had gone on without it."
)


class _Kept:
    """What passes at some ports at one moment of a step, in several steps.

    Attributes:
        ports: the ports, in the order of the forward.

    Tensors of one shape are kept in one piece, ``[tensors, requests, steps, ...]``, so that a step is written in one
    copy, and what belongs to one request is read in one piece.

    Args:
        passed: the ports, with what passes there.
        room: how many steps.
    """

    def __init__(self, passed: Sequence[tuple[Port, object]], room: int) -> None:
        tensors = [tensors_of(value) for _, value in passed]
        flat = [tensor for each in tensors for tensor in each]
        kinds: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for at, tensor in enumerate(flat):
            kinds.setdefault((tensor.shape, tensor.dtype), []).append(at)
        self.bytes = sum(tensor.nbytes for tensor in flat)
        self.ports = [port for port, _ in passed]
        self._pieces: list[tuple[list[int], torch.Tensor]] = []
        self._whole: list[torch.Tensor] = [*flat]
        self._rows: list[Sequence[torch.Tensor]] = [()] * len(flat)
        self._targets: dict[int, list[torch.Tensor]] = {}
        for places in kinds.values():
            one = flat[places[0]]
            piece = one.new_empty((len(places), one.shape[0], room, *one.shape[1:]))
            self._pieces.append((places, piece))
            for place, rows in zip(places, piece.unbind(0), strict=True):
                self._whole[place], self._rows[place] = rows, rows.unbind(0)
        end, self._parts = 0, {}
        for (port, value), each in zip(passed, tensors, strict=True):
            self._parts[port] = range(end, end + len(each)), not isinstance(value, torch.Tensor)
            end += len(each)

    def put(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Keep a step."""
        for places, piece in self._pieces:
            given = [tensors[place] for place in places]
            piece.select(2, number).copy_(torch.stack(given) if len(given) > 1 else given[0][None])

    def put_one(self, number: int, port: Port, value: object) -> bool:
        """Keep what passes at one port in a step; False if it is of another form than in the first one."""
        places, several = self._parts[port]
        tensors = [value] if isinstance(value, torch.Tensor) else tensors_of(value)
        if several is isinstance(value, torch.Tensor) or len(tensors) != len(places):
            return False
        targets = self._targets.get(number)
        if targets is None:
            targets = self._targets[number] = [whole.select(1, number) for whole in self._whole]
        for place, tensor in zip(places, tensors, strict=True):
            target = targets[place]
            if target.shape != tensor.shape or target.dtype is not tensor.dtype:
                return False
            target.copy_(tensor)
        return True

    def views(self, port: Port, row: int, count: int) -> tuple[list[torch.Tensor], bool]:
        """The first steps of one request, ``[steps, ...]`` of each tensor; and whether these are a tuple."""
        places, several = self._parts[port]
        return [self._rows[place][row].narrow(0, 0, count) for place in places], several

    def has(self, port: Port) -> bool:
        """Whether it is kept here."""
        return port in self._parts


class _Steps:
    """Some steps in a row.

    Attributes:
        room: how many there may be.
        count: how many there are.
        moments: what passes at each moment of a step: in the forward, with the logits, and with the samples.
    """

    def __init__(self) -> None:
        self.room = _MOST_STEPS
        self.count = 0
        self.moments: list[_Kept] = []

    def keep(self, moment: int, passed: Sequence[tuple[Port, object]]) -> None:
        """Keep what passes at a moment of the step that is running; the moments come in order."""
        if moment == len(self.moments):
            size = sum(tensor.nbytes for _, value in passed for tensor in tensors_of(value))
            size += sum(kept.bytes for kept in self.moments)
            self.room = max(1, min(self.room, _MOST_BYTES // max(size, 1)))
            self.moments.append(_Kept(passed, self.room))
        self.moments[moment].put(self.count, [tensor for _, value in passed for tensor in tensors_of(value)])

    def columns(self, ports: Sequence[Port], row: int) -> list[Sequence[object]]:
        """Copies for one request, of each port and step; those of one tensor have memory in common."""
        found = [next(kept for kept in self.moments if kept.has(port)).views(port, row, self.count) for port in ports]
        with inference_mode(False):
            made = iter(clone_each([view for views, _ in found for view in views]))
            columns: list[Sequence[object]] = []
            for views, several in found:
                split = [torch.unsafe_split(next(made), 1) for _ in views]  # each with a version of its own
                columns.append([*zip(*split, strict=True)] if several else split[0])
        return columns


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
        self._wanted: set[Port] = set()
        self._blocks: list[tuple[SteadyMediator, int]] = []  # with their places in the batch
        self._behind: list[tuple[SteadyMediator, int]] = []  # those that have yet to go over `_last`
        self._running: _Steps | None = None
        self._last: _Steps | None = None
        self._spare: _Steps | None = None
        self._modules = False
        self._moment = 0
        self._fired: list[tuple[Port, object]] = []  # in a forward that is kept as its ports fire
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
        self._wanted, self._blocks, self._behind = set(), [], []
        self._running = self._last = self._spare = None
        self._moment = 0

    def _look(self) -> None:
        """See whether the next step may be kept."""
        blocks: list[tuple[SteadyMediator, int]] = []
        wanted: set[Port] = set()
        for request, mediator in self.mediators.items():
            if mediator.done or isinstance(mediator.wait, EndWait):
                continue
            share = self._shares.get(request)
            if type(mediator) is not SteadyMediator or not mediator.ready or request in self.edited:
                return
            if share is None or share.rows is None or share.last is None or share.rows.length > 1:
                return
            blocks.append((mediator, share.last.start))
            wanted.update(mediator.trail)
        modules = {port for port in wanted if not port.of_step}
        if blocks and (self._can_keep(modules) if modules else self._graphs):
            self._blocks, self._wanted, self._modules = blocks, wanted, bool(modules)
            self.armed = True

    def _can_keep(self, modules: set[Port]) -> bool:
        if not self._graphs:  # as far as can be told before they fire
            return self.learned is not None and all(len(self.tree.places.get(port, ())) == 1 for port in modules)
        if self.passes is None or not modules <= {port for port, _ in self.passes.passed}:
            return False
        values = [value for port, value in self.passes.passed if port in modules]
        return len(values) == len(modules) and self._have_rows(values)

    def _have_rows(self, values: Sequence[object]) -> bool:
        """Whether these are tensors, or tuples of them, that have a row for each request."""
        rows = {tensor.shape[0] if tensor.ndim else 0 for value in values for tensor in tensors_of(value)}
        plain = all(
            isinstance(value, torch.Tensor) or (type(value) is tuple and len(tensors_of(value)) == len(value))
            for value in values
        )
        return plain and len(rows) == 1 and rows.pop() >= len(self._shares)

    def _keep_one(self, port: Port, value: object) -> None:
        """Keep what passes at a port of a module, which fires."""
        steps, at = self._running, len(self._fired)
        if steps is None or not steps.moments:
            self._fired.append((port, map_tensors(value, torch.clone)))
            return
        kept = steps.moments[0]
        self._fired.append((port, None))
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
            fits = len(fired) == len(modules) and self._have_rows([value for _, value in fired])
            if fits:
                self._keep(fired)
        if not fits:  # the model does not do as in the steps before
            blocks = self._blocks
            self._forget()
            for mediator, _ in blocks:
                if not mediator.done:
                    self._lose(mediator)
                    self._went_on(mediator)

    def _keep(self, passed: Sequence[tuple[Port, object]]) -> None:
        if self._running is None:
            self._running = _Steps()
        wanted = [(port, value) for port, value in passed if port in self._wanted]
        self._running.keep(self._moment, wanted)
        self._moment += 1

    def _step_kept(self) -> None:
        """The step is over; some blocks have their turns of steps before."""
        steps, self._moment = self._running, 0
        assert steps is not None, "something is kept in each step"
        steps.count += 1
        self.kept += 1
        if steps.count == steps.room:
            self._go_over(len(self._behind))
            self._last, self._running, self._spare = steps, self._spare or _Steps(), None
            self._behind = [*self._blocks]
        self._go_over(-(-len(self._blocks) // steps.room))

    def _go_over(self, most: int) -> None:
        """Some of the blocks that are behind have their turns."""
        if self._last is None:
            return
        now, self._behind = self._behind[:most], self._behind[most:]
        for mediator, row in now:
            self._give(mediator, row, self._last)
        if not self._behind and self._last is not None:
            self._last.count, self._spare, self._last = 0, self._last, None

    def _give(self, mediator: SteadyMediator, row: int, steps: _Steps | None) -> None:
        """A block has its turns of some steps."""
        if mediator.done or steps is None or not steps.count:
            return
        mediator.catch_up(steps.columns(mediator.trail, row), steps.count)
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
