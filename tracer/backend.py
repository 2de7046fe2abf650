"""Between a trace and whatever runs it.

A backend takes a payload and a request, runs them, and gives back a `Reply` together with the request's output.
"""

from __future__ import annotations

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
    """

    saves: Packed
    failure: Failure | None
    printed: str
    warnings: tuple[tuple[str, int], ...]
    learned: Learned | None


class Backend(Protocol):
    """Runs one block with one request."""

    def run(self, payload: Payload, request: object) -> tuple[Reply, object]:
        """Run the request with the block; returns the reply and the finished output of the request."""
        ...
