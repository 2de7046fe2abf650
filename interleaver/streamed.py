"""Values saved with ``stream=True``, until the engine sends them with the output of their step."""

from __future__ import annotations

from ..envoy.address import Port
from ..tracer.results import to_bytes


class Streamed:
    """What a block has streamed in this step.

    A value goes under the names that its statement gives it; without one, under the port that the block is at, or
    ``value`` if it is at none. A name that comes again in the same step gets a number: ``h``, ``h[1]``, ``h[2]``.
    """

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._times: dict[str, int] = {}

    def add(self, value: object, names: tuple[str, ...], port: Port | None) -> None:
        """Copy a value as it is now.

        Raises:
            SaveError: it cannot be sent.
        """
        names = names or (str(port) if port is not None else "value",)
        self._packed.append(to_bytes({self._numbered(name): value for name in names}))

    def take(self) -> list[bytes]:
        """`results.to_bytes` of each value; the next step begins."""
        packed, self._packed = self._packed, []
        self._times.clear()
        return packed

    def _numbered(self, name: str) -> str:
        times = self._times.get(name, 0)
        self._times[name] = times + 1
        return f"{name}[{times}]" if times else name
