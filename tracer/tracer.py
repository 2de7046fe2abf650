"""The object after `as`: control of the running request inside the block, its results afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..envoy import active
from ..envoy.errors import OutsideBlockError
from .block import TracerHandle
from .iteration import Steps

_UNSET = object()


class Tracer(TracerHandle):
    """One trace.

    Inside the block: `iter`, `all`, `stop` and `result`. After the `with`: `saves` and `result`.
    """

    def __init__(self) -> None:
        self._saves: dict[str, object] | None = None
        self._result: object = _UNSET

    @property
    def iter(self) -> Steps:
        """Steps to loop over: ``for step in tracer.iter[1:]``."""
        return Steps()

    def all(self) -> Iterator[int]:
        """Every step of the request, as ``tracer.iter[:]``."""
        return iter(Steps())

    def stop(self) -> None:
        """End the request with the token of this step, keep the saves, and leave the block."""
        active.session("`tracer.stop()`").stop()

    @property
    def result(self) -> Any:
        """The finished output of the request (vLLM's `RequestOutput`; the local backend's `LocalOutput`).

        Inside the block, waits until the request has ended.
        """
        session = active.current()
        if session is not None:
            return session.result()
        if self._result is _UNSET:
            raise OutsideBlockError("`tracer.result` is there once the `with` has ended.")
        return self._result

    @property
    def saves(self) -> dict[str, Any]:
        """Saved values by the name that held them at the end of the block."""
        if self._saves is None:
            raise OutsideBlockError("`tracer.saves` is there once the `with` has ended.")
        return self._saves

    @property
    def spent(self) -> bool:
        """Whether the trace has ended."""
        return self._saves is not None

    def finish(self, saves: dict[str, object], result: object) -> None:
        """Take in what came home; called by the trace at the end of its `with`."""
        self._saves = saves
        self._result = result
