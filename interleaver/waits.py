"""What a block hands over with: what it waits for until its next turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ..envoy.address import Port

if TYPE_CHECKING:
    from .values import Held


class StopBlock(BaseException):
    """Unwinds a block that called `tracer.stop()`."""


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


class CallWait:
    """Waiting for a module to be called, at a port or not, where ranks must do so together.

    Attributes:
        address: of the module.
        arguments: positional and keyword arguments.
        port: the port that the block is at.
        held: what it holds of that.
        part: what this rank calls it with.
        problem: why it has no part.
    """

    def __init__(
        self,
        address: str,
        arguments: tuple[tuple[object, ...], dict[str, object]],
        port: Port | None,
        held: Held | None,
    ) -> None:
        self.address = address
        self.arguments = arguments
        self.port = port
        self.held = held
        self.part: Any = None
        self.problem: Exception | None = None


Wait: TypeAlias = Port | StepWait | EndWait | BarrierWait | CallWait
"""What a block waits for; a port is one of the current step."""

WAITS = frozenset((Port, StepWait, EndWait, BarrierWait, CallWait))
"""The classes of these."""
