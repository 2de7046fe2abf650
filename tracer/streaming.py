"""Between a trace and a backend that gives outputs while the requests run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from .backend import Reply
from .block import Payload


class Ended(NamedTuple):
    """What a trace comes to.

    Attributes:
        saves: all saves.
        around: those of them that were saved around the invokes.
        error: what the trace raises; its saves are the same.
    """

    saves: dict[str, object]
    around: dict[str, object]
    error: BaseException | None


class Delivery(Protocol):
    """What a trace does with what comes home; called on the thread and in the task of whoever takes the outputs."""

    def arrived(self, invoke: int, reply: Reply, result: object) -> dict[str, object]:
        """The block of an invoke has ended (of number 0, if the trace is one block).

        Args:
            invoke: which one.
            reply: what it sends home.
            result: the finished output of its request.

        Returns:
            Its saves.
        """
        ...

    def ended(self) -> Ended:
        """All blocks have; nothing is raised. A warning that the caller made an error is that of the trace."""
        ...


class Outputs(Protocol):
    """The outputs of the requests of a trace as they come: ``tracer.backend``."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """The outputs, once; whoever leaves early aborts the requests."""
        ...

    def collect(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """Wait for the end; returns all saves."""
        ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Abort the requests that have not ended, and wait until they are gone."""
        ...


@runtime_checkable
class StreamingBackend(Protocol):
    """Starts blocks with their requests, and does not wait."""

    def submit(self, payload: Payload, request: object, delivery: Delivery) -> Outputs:
        """Send a request off.

        Args:
            payload: the block.
            request: what the backend makes of prompt and sampling arguments.
            delivery: takes what comes home.
        """
        ...

    def submit_group(self, payloads: Sequence[Payload], requests: Sequence[object], delivery: Delivery) -> Outputs:
        """Send the invokes of a trace off, whose payloads have a `group`."""
        ...
