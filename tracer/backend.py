"""Between a trace and whatever runs it.

A backend takes a payload and a request, runs them, and gives back a `Reply` together with the request's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..envoy.tree import Learned
from .block import Payload
from .failure import Failure
from .results import Packed


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What a block sends home when it has ended.

    Attributes:
        saves: the saved values by name.
        failure: the exception that ended the block, if one did.
        printed: what the block printed, in order.
        warnings: message and line number (0: none) of each warning.
        learned: order and shapes of the model's ports, when the executor has just learned them.
        shared: what was saved around the invokes of a trace, with the block that ended last; None with all others.
    """

    saves: Packed
    failure: Failure | None
    printed: str
    warnings: tuple[tuple[str, int], ...]
    learned: Learned | None
    shared: Packed | None = None


class Backend(Protocol):
    """Runs blocks, each with its request."""

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        """Run the request with the block; returns the reply and the finished output of the request."""
        ...

    def run_group(self, payloads: Sequence[Payload], requests: Sequence[object]) -> list[tuple[Reply, object]]:
        """Run the invokes of one trace, whose payloads have a `group`.

        Returns:
            Replies and finished outputs in invoke order; what goes wrong in one invoke is the failure of its reply.
        """
        ...
