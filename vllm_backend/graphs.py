"""CUDA graphs for steps in which blocks wait for modules: one graph where blocks only read, pieces where they edit.

A step with a module runs module by module, which on a GPU costs several times what a graph of the model does. Decoding
blocks ask for the same ports in step after step, though. So when a batch of some size was served at the same ports
twice, the forward is captured, and such steps replay it.

At ports where nobody has edited what passes, a copy of it is part of the graph, and the blocks have their turns when
the graph has been launched, from what is in the copies then. So for blocks that only read, the forward is one graph.
They even begin the step behind it, if they asked for these ports in the last one.

At ports where somebody has, the graph ends and the next one begins. The blocks have their turns between the two, on the
memory that the piece before has filled, and what they leave goes into memory of its own, which the next piece reads: an
edit replaces, as everywhere. At the first of these, too, blocks begin the step that asked for it in the last one.

A block may ask for a port that is not among these. If it does so before the forward, the step runs module by module. If
it does so later, or edits where nobody did, the forward is run again from its beginning, module by module; ports that
were served already are not served again, but get what the blocks had left there. Keys and values are written again as
they were. What was captured is then forgotten, and has to be earned anew, by more steps than before. Where a port was
edited, it is kept for others, and a forward with a break there is captured beside it.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..interleaver.hooks import Hooks
from ..interleaver.lagging_hub import LaggingHub
from ..interleaver.structure import map_tensors, tensors_of
from ..interleaver.supply import Supply
from ..interleaver.torch_compat import copy_each
from ..interleaver.values import put_rows
from .captured import Forward, Key, Missed

if TYPE_CHECKING:
    from ..envoy.address import Port
    from ..interleaver.hub import Hub
    from ..interleaver.values import Change
    from ..interleaver.windows import Share

Prepare = Callable[[bool], Callable[[], object]]


_KEPT = 16
"""Captured forwards that are kept; the one that was not used for the longest time goes first."""

_MOST_PORTS = 64
"""A step with more ports is not captured: each has memory of its own."""

_MOST_BYTES = 1 << 30
"""What that memory may be for all captured forwards."""

_TWICE = 2
_GRAPH_AND_TURNS = 2
"""Pieces of a forward that is one graph."""

_MOST_MISSES = 10
_REMEMBERED = 1000
_log = logging.getLogger(__name__)


class Graphs:
    """The captured forwards of a model, which must do the same when it is run again.

    Args:
        model: the loaded model.
        graph: makes a graph, as `torch.cuda.CUDAGraph`.

    Attributes:
        replayed: steps that were replayed.
        missed: those of them in which the forward had to be run again.
    """

    _hub: Hub
    _ports: frozenset[Port]
    _entering: Collection[str] = ()

    def __init__(self, model: torch.nn.Module, graph: Callable[[], Any] | None = None) -> None:
        self.replayed = self.missed = 0
        self._model = model
        self._graph = graph or torch.cuda.CUDAGraph
        self._on_gpu = graph is None
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._forwards: OrderedDict[Key, Forward] = OrderedDict()
        self._seen: Counter[Key] = Counter()
        self._misses: Counter[Key] = Counter()
        self._too_large: set[Key] = set()
        self._unfit = False
        self._left: list[object] = []

    def expected(self, hub: Hub, shares: Mapping[str, Share], without: Collection[str]) -> list[str]:
        """Requests whose blocks may begin the step behind the forward; `without` are those that must not."""
        forward = next(reversed(self._forwards.values()), None)
        if forward is None or forward.first is None or not hub.replaced.isdisjoint(forward.late):
            return []
        found = []
        for request, share in shares.items():
            mediator = hub.about_to_begin(request, share.step) if request not in without else None
            if mediator is not None and forward.first.expects(mediator):
                found.append(request)
        return found

    def run(self, rows: int, hub: Hub, prepare: Prepare, entering: Collection[str] = ()) -> object:
        """The forward of a step that decodes, in which some block waits for a module.

        Args:
            rows: of the batch, with padding.
            hub: of the blocks.
            prepare: makes ready to call the model on the inputs of the step, module by module; if that is to be
                captured, so that it will be right for whatever is in the same memory then.
            entering: requests whose blocks have yet to begin the step, those that were `expected`.
        """
        latest = next(reversed(self._forwards.values()), None)
        key, forward = self._fitting(rows, hub)
        if entering and (forward is None or forward is not latest):
            hub.enter(entering)
            entering = ()
            key, forward = self._fitting(rows, hub)
        if self._unfit:
            return prepare(False)()
        self._entering = entering
        if forward is not None:
            return self._replay(key, forward, hub, prepare)
        output = prepare(False)()
        ports = frozenset(hub.served)
        key = Key(rows, ports, ports.intersection(hub.replaced))
        if ports and len(ports) <= _MOST_PORTS and key not in self._forwards and key not in self._too_large:
            if len(self._seen) > _REMEMBERED:
                self._seen.clear()
                self._misses.clear()
            self._seen[key] += 1
            if self._seen[key] >= _TWICE << min(self._misses[key], _MOST_MISSES):
                with hub.calls.aside():
                    self._try_capture(key, hub, prepare)
        return output

    def run_late(self, rows: int, hub: Hub) -> object | None:
        """The forward of a step that is kept for the blocks (`LaggingHub`); None if it has no graph."""
        key = next(reversed(self._forwards), None)
        if key is None or key.rows != rows or not isinstance(hub, LaggingHub):
            return None
        forward = self._forwards[key]
        if forward.first is None or forward.first is not hub.passes:
            return None
        self.replayed += 1
        forward.pieces[0]()
        hub.keep(forward.first.passed)
        return forward.output

    def _fitting(self, rows: int, hub: Hub) -> tuple[Key, Forward | None]:
        """The forward that was used last among those with all ports that are waited for now."""
        for key in reversed(self._forwards):
            if key.fits(rows, hub):
                self._forwards.move_to_end(key)
                return key, self._forwards[key]
        return Key(rows, frozenset(), frozenset()), None

    # --- replay

    def _replay(self, key: Key, forward: Forward, hub: Hub, prepare: Prepare) -> object:
        self._hub, self._ports = hub, key.ports
        self.replayed += 1
        try:
            for piece in forward.pieces:
                piece()
        except Missed as miss:
            self.missed += 1
            if not self._left and not miss.changes:  # blocks that began the step here do something else in this one
                return self.run(key.rows, hub, prepare)
            if miss.edited is None:  # else there will be another one, with a break there
                self._forwards.pop(key, None)
                self._misses[key] += 1
            if miss.changes:
                return self._changed(miss.changes, prepare(False))
            return self._again(prepare(False))
        finally:
            self._left = []
        if isinstance(hub, LaggingHub) and len(forward.pieces) == _GRAPH_AND_TURNS:
            hub.passes = forward.first
        return forward.output

    def _serve(self, supply: Supply, goes_on: list[torch.Tensor]) -> None:
        """A port between two pieces: what goes on is what passes there, or what the blocks put in its place."""
        ((port, value),) = supply.passed
        with self._supplied(supply):
            replaced = self._hub.fire(port, value)
        copy_each(goes_on, tensors_of(value if replaced is None else replaced))
        self._left.append(replaced)
        self._check()

    def _check(self) -> None:
        if not self._ports.issuperset(self._hub.wanted):
            raise Missed(None)

    def _serve_late(self, supply: Supply) -> None:
        """Ports that the piece before has passed."""
        hub = self._hub
        with self._supplied(supply):
            for at, (port, value) in enumerate(supply.passed):
                if not hub.waited_for(port) and at not in supply.edits:
                    self._left.append(None)
                    continue
                supply.at = at
                replaced = hub.fire(port, value)
                self._left.append(replaced)
                if replaced is not None:
                    raise Missed(port)
                self._check()

    @contextmanager
    def _supplied(self, supply: Supply) -> Iterator[None]:
        """The ports of a supply fire in this context; blocks that have yet to begin the step do so before."""
        hub, entering = self._hub, self._entering
        hub.supply(supply, entering)
        try:
            if entering:
                self._entering = ()
                hub.enter(entering)
                if not self._ports.issuperset(hub.wanted):
                    raise Missed(None, {supply.passed[at][0]: changes for at, changes in supply.edits.items()})
            yield
        finally:
            hub.end_supply()

    def _again(self, call: Callable[[], object]) -> object:
        """The forward module by module, with what was left at the ports that have been served.

        Nothing fires for the blocks until it has come to the last of these.
        """
        ports, left, calls = self._ports, iter(self._left), self._hub.calls
        to_come = len(self._left)  # there is one at least

        def pass_again(port: Port, value: object) -> object:
            nonlocal to_come
            if port not in ports or not to_come:
                return None
            to_come -= 1
            if not to_come:
                calls.inside = False
            return next(left)

        hooks = Hooks(self._model, pass_again)
        for port in ports:
            hooks.watch(port)
        with calls.aside():
            try:
                return call()
            finally:
                hooks.clear()

    def _changed(self, changes: Mapping[Port, list[Change]], call: Callable[[], object]) -> object:
        """The forward module by module, with what blocks have put at ports that they were at before it."""

        def put(port: Port, value: object) -> object:
            return None if port not in changes or self._hub.calls.inside else put_rows(value, changes[port], port)

        hooks = Hooks(self._model, put)
        for port in changes:
            hooks.watch(port)
        self._hub.replaced.update(changes)
        try:
            return call()
        finally:
            hooks.clear()

    # --- capture

    def _try_capture(self, key: Key, hub: Hub, prepare: Prepare) -> None:
        try:
            forward = self._capture(key.ports, key.breaks, hub, prepare(True))
        except Exception:
            self._unfit = True
            self._forwards.clear()
            _log.warning("steps with modules run without CUDA graphs from now on", exc_info=True)
            return
        del self._seen[key]
        if forward.bytes > _MOST_BYTES:
            self._too_large.add(key)
            return
        self._forwards[key] = forward
        while len(self._forwards) > _KEPT or sum(kept.bytes for kept in self._forwards.values()) > _MOST_BYTES:
            self._forwards.popitem(last=False)

    def _capture(
        self, ports: frozenset[Port], breaks: frozenset[Port], hub: Hub, call: Callable[[], object]
    ) -> Forward:
        forward = Forward(ports - breaks)
        passed: list[tuple[Port, object]] = []
        graph: Any = None

        def begin() -> None:
            nonlocal graph
            graph = self._graph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end() -> None:
            nonlocal passed
            graph.capture_end()
            forward.pieces.append(graph.replay)
            if passed:
                supply = Supply(passed, hub.tree.places)
                if len(forward.pieces) == 1:
                    forward.first = supply
                forward.pieces.append(lambda: self._serve_late(supply))
                passed = []

        def own(tensor: torch.Tensor, made: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            forward.bytes += tensor.nbytes
            return made(tensor)

        def tap(port: Port, value: object) -> object:
            if port not in ports:
                return None
            if port not in breaks:
                passed.append((port, map_tensors(value, lambda tensor: own(tensor, torch.clone))))
                return None
            end()
            goes_on = map_tensors(value, lambda tensor: own(tensor, torch.empty_like))
            targets, supply = tensors_of(goes_on), Supply([(port, value)], hub.tree.places)
            if len(forward.pieces) == 1:
                forward.first = supply
            forward.pieces.append(lambda: self._serve(supply, targets))
            begin()
            return goes_on

        hooks = Hooks(self._model, tap)
        for port in ports:
            hooks.watch(port)
        collects = gc.isenabled()
        gc.disable()
        try:
            with self._side_stream(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of graphs with nothing in them, between two breaks
                begin()
                try:
                    forward.output = call()
                finally:
                    end()
        finally:
            hooks.clear()
            if collects:
                gc.enable()
        return forward

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Where graphs can be captured."""
        if not self._on_gpu:
            yield
            return
        if not self._forwards:
            self._pool = torch.cuda.graph_pool_handle()  # one that no graph has is gone
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one, for which cuBLAS has its memory
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()
