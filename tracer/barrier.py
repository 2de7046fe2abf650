"""Places where blocks of one trace wait for each other."""

from __future__ import annotations

from ..envoy import active


class Barrier:
    """What `tracer.barrier(n)` gives: called in a block, it waits until `count` blocks have called it.

    Args:
        key: what tells it from other barriers of the trace.
        count: how many blocks meet.
    """

    def __init__(self, key: str, count: int) -> None:
        self.key = key
        self.count = count

    def __call__(self) -> None:
        """Wait for the other blocks.

        Raises:
            OutsideBlockError: no block is running.
            InvokeError: so many blocks cannot come any more.
        """
        active.session("a barrier").meet(self.key, self.count)

    def __repr__(self) -> str:
        return f"<barrier {self.key} of {self.count} blocks>"
