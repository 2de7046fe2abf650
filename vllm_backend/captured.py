"""A captured forward of a model, what it is for, and what ends its replay (`graphs`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..envoy.address import Port
    from ..interleaver.hub import Hub
    from ..interleaver.supply import Supply
    from ..interleaver.values import Change


class Key(NamedTuple):
    """What a captured forward is for.

    Attributes:
        rows: of the batch, with padding.
        ports: that it serves.
        breaks: those of them at which the graph ends and the next one begins.
    """

    rows: int
    ports: frozenset[Port]
    breaks: frozenset[Port]

    def fits(self, rows: int, hub: Hub) -> bool:
        """Whether it serves what blocks wait for, and breaks off exactly where some have edited."""
        return (
            self.rows == rows
            and self.ports.issuperset(hub.wanted)
            and self.breaks == self.ports.intersection(hub.replaced)
        )


class Missed(Exception):
    """The forward has to be run again.

    Attributes:
        edited: the port that was edited behind the forward; None if a block waits for one that is not captured.
        changes: what other blocks have put at ports at which they began the step; it may come before these.
    """

    def __init__(self, edited: Port | None, changes: Mapping[Port, list[Change]] | None = None) -> None:
        super().__init__()
        self.edited = edited
        self.changes = changes or {}


class Forward:
    """One captured forward.

    Attributes:
        pieces: replays of graphs, and what is done between them, in order.
        late: ports that are served from copies.
        first: those that the first of the graphs passes.
        output: what the model returned, in the memory of the last graph.
        bytes: of the memory that ports have.
    """

    def __init__(self, late: Collection[Port]) -> None:
        self.pieces: list[Callable[[], object]] = []
        self.late = late
        self.first: Supply | None = None
        self.output: object = None
        self.bytes = 0
