"""CUDA graphs for steps in which blocks wait for modules: the forward in pieces, with breaks at just those ports.

A step with a module runs module by module, which on a GPU costs several times what a graph of the model does. Decoding
blocks ask for the same ports in step after step, though. So when a batch of some size was served at the same ports
twice, the forward is captured as a list of graphs that ends and begins anew at each of these ports. Such steps then
replay these pieces; at a port the blocks have their turns on the memory that the piece before has filled, and what they
leave goes into memory of its own, which the next piece reads: an edit replaces, as everywhere.

A block may ask for a port at which there is no break. If it does so before the forward, the step runs module by module.
If it does so later, the forward is run again from its beginning, module by module; ports that were served already are
not served again, but get what the blocks had left there. Keys and values are written again as they were.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..interleaver.hooks import Hooks
from ..interleaver.torch_compat import copy_each
from ..interleaver.values import map_tensors, tensors_of

if TYPE_CHECKING:
    from ..envoy.address import Port
    from ..interleaver.hub import Hub

Prepare = Callable[[bool], Callable[[], object]]

_KEPT = 16
"""Captured forwards that are kept; the one that was not used for the longest time goes first."""

_MOST_PORTS = 64
"""A step with more ports is not captured: each is a piece, with memory of its own."""

_TWICE = 2
_REMEMBERED = 1000
_log = logging.getLogger(__name__)


class Missed(Exception):
    """A block waits for a port that is not a break."""


class _Forward:
    """One captured forward.

    Attributes:
        pieces: replays of graphs, and what is done between them, in order.
        output: what the model returned, in the memory of the last graph.
    """

    def __init__(self) -> None:
        self.pieces: list[Callable[[], object]] = []
        self.output: object = None


class Graphs:
    """The captured forwards of a model.

    Args:
        model: the loaded model.
        graph: makes a graph, as `torch.cuda.CUDAGraph`.
    """

    _hub: Hub
    _breaks: frozenset[Port]

    def __init__(self, model: torch.nn.Module, graph: Callable[[], Any] | None = None) -> None:
        self._model = model
        self._graph = graph or torch.cuda.CUDAGraph
        self._on_gpu = graph is None
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._forwards: OrderedDict[tuple[int, frozenset[Port]], _Forward] = OrderedDict()
        self._seen: Counter[tuple[int, frozenset[Port]]] = Counter()
        self._unfit = False
        self._left: dict[Port, list[object]] = {}

    def run(self, rows: int, hub: Hub, prepare: Prepare) -> object:
        """The forward of a step that decodes, in which some block waits for a module.

        Args:
            rows: of the batch, with padding.
            hub: of the blocks.
            prepare: makes ready to call the model on the inputs of the step, module by module; if that is to be
                captured, so that it will be right for whatever is in the same memory then.
        """
        if self._unfit:
            return prepare(False)()
        key, forward = self._fitting(rows, hub)
        if forward is not None:
            return self._replay(key[1], forward, hub, prepare)
        output = prepare(False)()
        key = (rows, frozenset(hub.served))
        if key[1] and len(key[1]) <= _MOST_PORTS and key not in self._forwards:
            if len(self._seen) > _REMEMBERED:
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] >= _TWICE:
                with hub.calls.aside():
                    self._try_capture(key, prepare)
        return output

    def _fitting(self, rows: int, hub: Hub) -> tuple[tuple[int, frozenset[Port]], _Forward | None]:
        """The forward that was used last among those with breaks at all ports that are waited for now."""
        wanted = hub.wanted
        for key in reversed(self._forwards):
            if key[0] == rows and key[1].issuperset(wanted):
                self._forwards.move_to_end(key)
                return key, self._forwards[key]
        return (rows, frozenset()), None

    # --- replay

    def _replay(self, breaks: frozenset[Port], forward: _Forward, hub: Hub, prepare: Prepare) -> object:
        self._hub, self._breaks = hub, breaks
        try:
            for piece in forward.pieces:
                piece()
        except Missed:
            return self._again(prepare(False))
        finally:
            self._left = {}
        return forward.output

    def _serve(self, port: Port, value: object, goes_on: list[torch.Tensor]) -> None:
        """A port between two pieces: what goes on is what passes there, or what the blocks put in its place."""
        replaced = self._hub.fire(port, value)
        copy_each(goes_on, tensors_of(value if replaced is None else replaced))
        self._left.setdefault(port, []).append(replaced)
        if not self._breaks.issuperset(self._hub.wanted):
            raise Missed

    def _again(self, call: Callable[[], object]) -> object:
        """The forward module by module, with what was left at the ports that have been served."""
        left = {port: iter(values) for port, values in self._left.items()}
        hooks = Hooks(self._model, lambda port, value: next(left[port], None) if port in left else None)
        for port in left:
            hooks.watch(port)
        try:
            return call()
        finally:
            hooks.clear()

    # --- capture

    def _try_capture(self, key: tuple[int, frozenset[Port]], prepare: Prepare) -> None:
        try:
            forward = self._capture(key[1], prepare(True))
        except Exception:
            self._unfit = True
            self._forwards.clear()
            _log.warning("steps with modules run without CUDA graphs from now on", exc_info=True)
            return
        self._forwards[key] = forward
        while len(self._forwards) > _KEPT:
            self._forwards.popitem(last=False)
        del self._seen[key]

    def _capture(self, ports: frozenset[Port], call: Callable[[], object]) -> _Forward:
        forward = _Forward()
        graph: Any = None

        def begin() -> None:
            nonlocal graph
            graph = self._graph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end() -> None:
            graph.capture_end()
            forward.pieces.append(graph.replay)

        def tap(port: Port, value: object) -> object:
            if port not in ports:
                return None
            end()
            goes_on = map_tensors(value, torch.empty_like)
            targets = tensors_of(goes_on)
            forward.pieces.append(lambda: self._serve(port, value, targets))
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
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one, for which cuBLAS has its memory
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()
