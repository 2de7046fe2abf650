"""Blocks at a barrier for others that never find memory to begin. No vLLM here: numbers in, names out."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from time import monotonic

PATIENCE = 5.0
"""Seconds in which nothing was computed, after which nothing will be.

The requests of a trace come one after the other, so the first of them may stand at a barrier before the last is here.
"""


class Stuck:
    """Since when an engine has been standing still with requests at barriers."""

    def __init__(self) -> None:
        self._since: float | None = None

    def see(self, held: AbstractSet[str], moving: bool) -> AbstractSet[str]:
        """See an engine step.

        Args:
            held: requests at barriers.
            moving: something is computed, or will be without them.

        Returns:
            The requests to end.
        """
        if moving or not held:
            self._since = None
            return frozenset()
        now = monotonic()
        if self._since is None:
            self._since = now
        return held if now - self._since >= PATIENCE else frozenset()
