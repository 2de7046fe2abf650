"""The traces of one worker: from payloads in to replies out. The same for every runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import torch

from ..envoy.address import LOGITS, SAMPLES, Port, port_at
from ..envoy.envoy import Envoy, RootEnvoy
from ..envoy.errors import InternalError, MisuseError
from ..interleaver.device import Cuda, DeviceLimit
from ..interleaver.group import Groups
from ..interleaver.hub import Hub
from ..interleaver.lagging_hub import LaggingHub
from ..interleaver.launch import launch
from ..interleaver.staged_hub import Staged
from ..interleaver.supply import Supply
from ..interleaver.torch_compat import inference_mode
from ..tracer.block import Payload, TensorBlob
from .ahead import Ahead
from .hubs import fit_in, is_whole, kind_of, whole_hub
from .outbox import Outbox
from .request_output import decode_output
from .settings import NOW
from .traces import Known, Traces

if TYPE_CHECKING:
    from ..interleaver.limits import Limits
    from .adapter import NewRequest, RunnerAdapter
    from .graphs import Graphs
    from .in_band import Cargo

_LOGITS, _SAMPLES = port_at("", LOGITS), port_at("", SAMPLES)
_log = logging.getLogger(__name__)


class Serving:
    """The blocks that run in one worker.

    The hub is made when the first traced request comes, since the model is loaded after the runner is built.

    Args:
        adapter: the runner's answers.
        vocabulary: size of the model's vocabulary.
        limits: of each block.
        ahead: the engine prepares steps before the tokens of the last one are known.
        home: what blocks save goes home from this worker; several may run the same blocks.
        last: it has the last layers, and so the logits and samples.
        make_hub: makes the hub of a worker that has a part of the model only.
    """

    def __init__(
        self,
        adapter: RunnerAdapter,
        vocabulary: int,
        limits: Limits,
        *,
        ahead: bool = False,
        home: bool = True,
        last: bool = True,
        make_hub: Callable[[RunnerAdapter], Hub] | None = None,
    ) -> None:
        self._make_hub = make_hub or whole_hub
        self._ahead = Ahead(adapter.tokens) if ahead else None
        self._late: Sequence[str] = ()
        self._begun: tuple[int, Graphs | None] = 0, None
        self._padded = 0
        self._left: AbstractSet[str] = frozenset()  # requests that have left, whose traces are there still
        self._expected: Sequence[str] = ()
        self._device_limit: DeviceLimit | None = None
        self._limits = limits
        self._adapter = adapter
        self._vocabulary = vocabulary
        self._hub: Hub | None = None
        self._root: RootEnvoy | None = None
        self.outbox = Outbox(home=home)
        self._traces = Traces(self.outbox, last=last)
        self._last = last
        self._groups = Groups()

    @property
    def active(self) -> bool:
        """Whether any traced request is known; if not, the runner does what it does without invivo."""
        return len(self._traces) > 0

    def warm_up(self, forward: Callable[[], object]) -> None:
        """The engine warms up; see `RunnerAdapter`."""
        self._adapter.warm_up(forward)

    # --- an engine step

    def clean(self, scheduled: object) -> None:
        """Zero the key-value blocks of edited requests that give them back with this engine step.

        Attention reads whole blocks and masks what is not the request's. A NaN that an edit left behind would come
        through the mask (``0 * nan``), to whoever has the block next.
        """
        edited = self._hub.edited if self._hub is not None else set()
        for request_id in edited & self._adapter.leaving(scheduled) if edited else ():
            self._guarded(partial(self._adapter.clean, request_id))
            edited.discard(request_id)

    def leave(self, scheduled: object) -> None:
        """Forget the traces of requests that have left, once nobody will ask for their reply."""
        if self.active and ((finished := self._adapter.finished(scheduled)) or self._left):
            hub, now = self._ready(), getattr(scheduled, NOW, None) or monotonic()
            with inference_mode(True):  # others that wait for them in vain have a turn
                self._guarded(lambda: self._traces.leave(finished, hub, now))
            self._left = hub.mediators.keys() & (self._left | finished)

    def admit(self, scheduled: object) -> None:
        """Take in the traced requests of an engine step."""
        for new in self._adapter.new_requests(scheduled):
            self._guarded(partial(self._admit, new))

    def begin(self, rows: int, graphs: Graphs | None = None) -> None:
        """A forward of this many rows will run; the blocks that it concerns get their turn.

        Some may get it behind the forward, if it is one of `graphs`; see `take_expected`.
        """
        self._expected = ()
        self._guarded(partial(self._begin, rows, graphs))

    def take_expected(self) -> Sequence[str]:
        """Requests whose blocks have yet to begin the step: they meet modules, as far as is known."""
        expected, self._expected = self._expected, ()
        return expected

    @property
    def hub(self) -> Hub:
        """Where the blocks meet the model."""
        return self._ready()

    @property
    def repeatable(self) -> bool:
        """Whether a forward does the same when it is run again."""
        return isinstance(self._ready(), LaggingHub)

    @property
    def needs_modules(self) -> bool:
        """Whether a block waits for a module in the step that has begun, or is expected to."""
        return bool(self._expected) or self._ready().needs_modules

    def forward(self, rows: int, forward: Callable[[], object], *, again: bool) -> object:
        """Run the forward of a step, module by module if a block waits for a module.

        Args:
            rows: those of its tensors, with padding.
            forward: runs it.
            again: it does the same when it is run again.
        """
        self.pad(rows)
        if self.needs_modules:
            hub = self._ready()
            with self._adapter.eagerly(hub.meets_inside):
                output = hub.run(forward) if again or hub.lagging else forward()
        else:
            output = forward()
        self.forward_done()
        return output

    def pad(self, padded: int) -> None:
        """The forward runs on this many rows."""
        self._padded = padded
        self._ready().pad(padded)

    def resume(self) -> None:
        """The step that has begun cannot be kept for the blocks after all: they have their turns now, as ever."""
        hub = self._ready()
        if isinstance(hub, LaggingHub):
            hub.catch_up()
        self.begin(*self._begun)
        self.pad(self._padded)

    def eagerly(self) -> AbstractContextManager[None]:
        """The forward runs module by module in this context."""
        if self._ready().lagging:
            self.resume()
        if self._expected:
            self._ready().enter(self.take_expected())
        return self._adapter.eagerly(self._ready().meets_inside)

    def forward_done(self) -> None:
        """The forward is over."""
        self._ready().forward_done()

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[requests, vocab]``, with the blocks' edits."""
        if not self._late:
            return self._fired(_LOGITS, logits)
        self._guarded(partial(self._enter_late, logits))
        edited = self._fired(_LOGITS, logits)
        self._ready().end_supply()
        return edited

    def samples(self, samples: torch.Tensor) -> torch.Tensor:
        """Sampled token ids ``[requests, 1]``, with the blocks' edits."""
        return self._fired(_SAMPLES, samples[:, 0])[:, None] if self._ready().waited_for(_SAMPLES) else samples

    def finish_step(self) -> None:
        """The tokens of the engine step are sampled."""
        self._ready().finish_step()

    def sampled(self, output: object) -> None:
        """What the runner gave for the engine step; with asynchronous scheduling, its tokens are still on their way."""
        if self._ahead is not None:
            self._ahead.sampled(output)

    def cargo(self) -> dict[str, Cargo]:
        """What goes home with the engine step that is over, by request."""
        found: dict[str, Cargo] = {}
        self._guarded(lambda: found.update(self._traces.cargo(self._ready())))
        return found

    def abandon_step(self) -> None:
        """The engine step failed."""
        self._ready().abandon_step()

    # --- stages of a pipeline

    def hear(self, told: bytes) -> None:
        """What the stages before this one have read in the engine step that begins."""
        hub = self._ready()
        if isinstance(hub, Staged):
            self._guarded(partial(hub.hear, told))

    def hear_back(self, told: Mapping[str, bytes]) -> None:
        """What later stages have read in the last steps of requests, which go on."""
        hub = self._ready()
        if isinstance(hub, Staged):
            self._guarded(partial(hub.hear_back, told))

    def tell(self) -> bytes:
        """This stage's part of the engine step is over: what the next one is told."""
        hub = self._ready()
        hub.finish_step()
        assert isinstance(hub, Staged), "there are stages"
        return hub.tell()

    def tell_back(self) -> dict[str, bytes]:
        """What the stages before this one, the last, are told of the engine step that is over."""
        hub = self._ready()
        found: dict[str, bytes] = {}
        if isinstance(hub, Staged):
            self._guarded(lambda: found.update(hub.tell_back()))
        return found

    # --- calls from the client

    def collect(self, trace: str, output: bytes) -> bytes:
        """End the block of a request that has ended with `output`, and give the parcel of its reply."""
        hub = self._ready()
        if isinstance(hub, Staged):
            hub.meet_at_end(self._traces.grouped(trace))  # other blocks of the trace may need what it gives
            if not self._last and not self._traces.knows(trace):
                return b""
        known = self._traces.fetched(trace)
        with torch.inference_mode():
            hub.end(known.request_id, decode_output(output))
            parcel = self._traces.parcel(trace, known, hub)
        hub.remove(known.request_id)
        return parcel

    def collect_all(self, asked: Sequence[tuple[str, bytes]]) -> bytes:
        """`collect` for several, in order; nothing where another worker answers."""
        return msgspec.msgpack.encode(parcels) if any(parcels := [self.collect(*one) for one in asked]) else b""

    def discard(self, trace: str) -> None:
        """Forget a trace whose caller has given up."""
        known = self._traces.given_up(trace)
        if known is not None:
            self._ready().remove(known.request_id)
        self.outbox.drop(trace)

    def bring(self, group: str, common: bytes) -> None:
        """Keep the tensors that the blocks of a trace have in common, which come before the first of them."""
        self._groups.bring(group, msgspec.msgpack.decode(common, type=tuple[TensorBlob, ...]))

    def discard_group(self, group: str, traces: Sequence[str]) -> None:
        """Forget a trace of several invokes, whether they have started or not."""
        for trace in traces:
            self.discard(trace)
        self._groups.drop(group)

    def check_integrity(self) -> str:
        """Empty if nothing is left of earlier traces, else what is."""
        try:
            if self._hub is not None:
                self._hub.check_integrity()
            if self._traces:
                raise InternalError(f"{len(self._traces)} traces were not collected.")
            if len(self._groups):
                raise InternalError(f"{len(self._groups)} traces of several invokes are not over.")
            self.outbox.check_integrity()
        except InternalError as error:
            return str(error)
        return ""

    # --- inside

    def _begin(self, rows: int, graphs: Graphs | None) -> None:
        hub = self._ready()
        if self._device_limit is not None and not (isinstance(hub, LaggingHub) and hub.armed and hub.kept % 8):
            self._check_device(self._device_limit)
        self._begun = rows, graphs
        if isinstance(hub, LaggingHub) and hub.armed and hub.lags(follows=self._adapter.follows()):
            self._late = ()
            return
        shares = self._adapter.shares(rows)
        without: set[str] = set()
        if self._ahead is not None:
            self._late = self._ahead.late(hub.mediators, shares)
            without = {*self._late, *self._ahead.over(shares.keys() - self._late)}
        if graphs is not None:
            self._expected = graphs.expected(hub, shares, without)
        hub.begin(shares, without.union(self._expected))

    def _check_device(self, limit: DeviceLimit) -> None:
        hub = self._ready()
        for request, error in limit.over(hub.mediators).items():
            hub.end_over(request, error)

    def _enter_late(self, logits: torch.Tensor) -> None:
        assert self._ahead is not None, "it says who is late"
        late, self._late = self._late, ()
        over = self._ahead.over(late)
        hub, entering = self._ready(), [request for request in late if request not in over]
        if is_whole(hub):
            hub.supply(Supply([(_LOGITS, logits)], {}, number=-1), entering)
        hub.enter(entering)

    def _admit(self, new: NewRequest) -> None:
        hub = self._ready()
        if new.request_id in hub.mediators:
            return  # readmitted after a preemption; the step that it repeats ends it
        payload = msgspec.msgpack.decode(new.payload, type=Payload)
        launched = launch(
            payload,
            hub.tree,
            self._envoy,
            self._device(),
            capture_output=True,
            groups=self._groups,
            limits=self._limits,
            kind=kind_of(hub, payload, new, ahead=self._ahead is not None),
        )
        fit_in(launched.mediator, hub, new, self._adapter)
        group = payload.group.trace if payload.group is not None else None
        if self._ahead is not None:
            self._ahead.add(new.request_id, payload.group, new.stops, no_module=payload.no_module)
        self._traces.add(payload.trace, Known(new.request_id, launched, group))
        if self._device_limit is not None and not hub.mediators:
            self._device_limit.begin()
        hub.add(new.request_id, launched.mediator, self._vocabulary)

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run a part of a step; an error in it ends the traces and never the engine."""
        try:
            action()
        except Exception as error:
            _log.exception("invivo failed in an engine step; the traces in it end, everything else goes on")
            self._ready().give_up(error)

    def _ready(self) -> Hub:
        if self._hub is None:
            self._hub = self._make_hub(self._adapter)
            self._root = RootEnvoy(self._hub.tree, "")
            device = self._device()
            if self._limits.memory is not None and device is not None and device.type == "cuda":
                self._device_limit = DeviceLimit(self._limits.memory, Cuda())
        return self._hub

    def _envoy(self, address: str) -> Envoy:
        assert self._root is not None and self._hub is not None, "made with the hub"
        if address and address not in self._hub.tree.modules:
            raise MisuseError(f"the engine's model has no module {address}, though the mirror has.")
        return Envoy(self._hub.tree, address, self._root) if address else self._root

    def _device(self) -> torch.device | None:
        parameters: Iterable[torch.nn.Parameter] = self._adapter.model().parameters()
        return next((parameter.device for parameter in parameters), None)

    def _fired(self, port: Port, value: torch.Tensor) -> torch.Tensor:
        replaced = self._ready().fire(port, value)
        return replaced if isinstance(replaced, torch.Tensor) else value
