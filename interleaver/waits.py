"""What a block can wait for when it hands over."""

from __future__ import annotations

from typing import TypeAlias

from ..envoy.address import Port


class StepWait:
    """Waiting for a step to begin."""

    def __init__(self, step: int) -> None:
        self.step = step


class EndWait:
    """Waiting for the request to end."""


class BarrierWait:
    """Waiting for other blocks of the trace to come to a barrier."""

    def __init__(self, barrier: str, count: int) -> None:
        self.barrier = barrier
        self.count = count


Wait: TypeAlias = Port | StepWait | EndWait | BarrierWait
"""What a block waits for; a port is one of the current step."""
