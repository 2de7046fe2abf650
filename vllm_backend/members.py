"""Which requests of one trace wait for which. No vLLM here.

The invokes of a trace are requests of their own. One that takes a value from an earlier one is not scheduled before
that one's block has ended; one that meets earlier ones at a barrier is not before these have come there. So a block
waits by not being computed, and never holds the engine up. Both only look back, so nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ..tracer.block import Group


class Members:
    """The requests of all traces of several invokes that an engine has."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._requests: dict[tuple[str, int], set[str]] = {}
        self._over: dict[str, set[int]] = {}
        self._seen: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Number of requests and traces that are remembered."""
        return len(self._groups) + len(self._over)

    def add(self, request: str, group: Group) -> None:
        """A request has come."""
        self._groups[request] = group
        self._requests.setdefault((group.trace, group.index), set()).add(request)
        self._seen.setdefault(group.trace, set()).add(group.index)

    def block_ended(self, request: str) -> None:
        """The block of a request has ended; the request may go on."""
        group = self._groups.get(request)
        if group is not None:
            self._over.setdefault(group.trace, set()).add(group.index)

    def complete(self, request: str) -> bool:
        """Whether all requests of its trace have come."""
        group = self._groups.get(request)
        return group is None or len(self._seen[group.trace]) == group.size

    def remove(self, request: str, *, aborted: bool = False) -> None:
        """A request has left, in whatever way; with the last one of a trace, the trace is forgotten.

        Args:
            request: the request.
            aborted: its client has given up, and sends no more of the trace.
        """
        group = self._groups.pop(request, None)
        if group is None:
            return
        place = (group.trace, group.index)
        self._requests[place].discard(request)
        if not self._requests[place]:
            del self._requests[place]
            self._over.setdefault(group.trace, set()).add(group.index)
        last = aborted or len(self._seen[group.trace]) == group.size
        if last and not any(trace == group.trace for trace, _ in self._requests):
            del self._seen[group.trace]
            self._over.pop(group.trace, None)

    def waits(self, request: str, at_barrier: AbstractSet[str]) -> bool:
        """Whether a request that has not begun has to wait for others of its trace.

        Args:
            request: the request.
            at_barrier: requests whose blocks stand at a barrier now.
        """
        group = self._groups.get(request)
        if group is None:
            return False
        over = self._over.get(group.trace, set())
        if any(index not in over for _, index in group.takes):
            return True
        barriers = {barrier for barrier, _ in group.barriers}
        return any(
            other.trace == group.trace
            and other.index < group.index
            and other.index not in over
            and name not in at_barrier
            and barriers & {barrier for barrier, _ in other.barriers}
            for name, other in self._groups.items()
        )
