"""Between a trace and a backend that gives outputs while the request runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeAlias, runtime_checkable

from .backend import Reply
from .block import Payload

Deliver: TypeAlias = "Callable[[Reply, object], dict[str, object]]"
"""What a trace does with the reply of its block and the finished output: gives the saves, or raises the error."""


class Outputs(Protocol):
    """The outputs of one request as they come: ``tracer.backend``."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """The outputs, once; whoever leaves early aborts the request."""
        ...

    def collect(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """Wait for the end; returns all saves."""
        ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Abort the request, if it has not ended, and wait until it is gone."""
        ...


@runtime_checkable
class StreamingBackend(Protocol):
    """Starts one block with one request, and does not wait."""

    def submit(self, payload: Payload, request: object, deliver: Deliver) -> Outputs:
        """Send the request off.

        Args:
            payload: the block.
            request: what the backend makes of prompt and sampling arguments.
            deliver: called at the end, on the thread and in the task of whoever takes the last output.
        """
        ...
