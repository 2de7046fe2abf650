"""Which requests of one trace wait for which at a barrier. No vLLM here.

The invokes of a trace are requests of their own. One that meets earlier ones at a barrier is not scheduled before these
have come there, or have ended: so it begins in the step that lets all of them go on, and a block waits by not being
computed. That only looks back, so nobody waits in a circle. (One that takes a value from an earlier one need not wait
here: the client sends it when that one is over.)
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ..tracer.block import Group


class Members:
    """The requests of all traces of several invokes that an engine has."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._running: dict[str, dict[str, Group]] = {}

    def __len__(self) -> int:
        """Number of requests that are remembered."""
        return len(self._groups)

    def add(self, request: str, group: Group) -> None:
        """A request has come."""
        self._groups[request] = group
        self._running.setdefault(group.trace, {})[request] = group

    def block_ended(self, request: str) -> None:
        """The block of a request has ended, or waits for the end of the request; the request may go on."""
        group = self._groups.get(request)
        if group is not None:
            self._forget(request, group)

    def remove(self, request: str) -> None:
        """A request has left, in whatever way."""
        group = self._groups.pop(request, None)
        if group is not None:
            self._forget(request, group)

    def shares(self, request: str) -> bool:
        """Whether other blocks of its trace can tell the order of the turns of a request's block."""
        group = self._groups.get(request)
        return group is not None and not group.alone

    def shared(self, request: str) -> str | None:
        """The trace of a request whose block runs and shares something with others of it; else None."""
        group = self._groups.get(request)
        if group is None or group.alone or request not in self._running.get(group.trace, ()):
            return None
        return group.trace

    def _forget(self, request: str, group: Group) -> None:
        running = self._running.get(group.trace, {})
        running.pop(request, None)
        if not running:
            self._running.pop(group.trace, None)

    def waits(self, request: str, at_barrier: AbstractSet[str]) -> bool:
        """Whether a request that has not begun has to wait for others of its trace.

        Args:
            request: the request.
            at_barrier: requests whose blocks stand at a barrier now.
        """
        group = self._groups.get(request)
        if group is None or not group.barriers:
            return False
        barriers = dict(group.barriers).keys()
        return any(
            other.index < group.index and name not in at_barrier and barriers & dict(other.barriers).keys()
            for name, other in self._running.get(group.trace, {}).items()
        )
