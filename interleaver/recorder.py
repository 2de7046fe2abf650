"""The execution order of a model's ports, learned from one forward."""

from __future__ import annotations

import torch

from ..envoy.address import OUTPUT, Port
from ..envoy.tree import Learned


class Recorder:
    """Notes every port that fires during one step, and the shapes of the outputs.

    Attributes:
        places: where in the order each port has fired so far.
    """

    def __init__(self) -> None:
        self.places: dict[Port, list[int]] = {}
        self._order: list[Port] = []
        self._shapes: dict[str, str] = {}

    def note(self, port: Port, value: object, rows: int | None) -> None:
        """Add a port that fires now; `rows` is the number of rows of the batch, shown as ``n``."""
        self.places.setdefault(port, []).append(len(self._order))
        self._order.append(port)
        if port.kind == OUTPUT:
            self._shapes[port.address] = _shape(value, rows)

    def learned(self) -> Learned:
        """What was noted."""
        return Learned(tuple((port.address, port.kind) for port in self._order), dict(self._shapes))


def _shape(value: object, rows: int | None) -> str:
    try:
        return _shape_in(value, rows)
    except RecursionError:  # it contains itself
        return type(value).__name__


def _shape_in(value: object, rows: int | None) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [str(size) for size in value.shape]
        if str(rows) in sizes:
            sizes[sizes.index(str(rows))] = "n"
        return f"[{', '.join(sizes)}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(_shape_in(item, rows) for item in value)})"
    return type(value).__name__
