"""Sending values to the other side and back, without a trace."""

from __future__ import annotations

from typing import Any

from invivo.envoy.envoy import Envoy
from invivo.tracer.codec import Encoded, decode, encode


class Stand(Envoy):
    """An Envoy without a tree."""

    def __init__(self, address: str = "", root: Envoy | None = None) -> None:
        self._address = address
        self._root = self if root is None else root

    def __repr__(self) -> str:
        return f"Stand({self._address!r})"


MODEL = Stand()


def send(**names: object) -> Encoded:
    return encode({"local": names, "global": {}}, MODEL)


def receive(encoded: Encoded, **more: Any) -> dict[str, Any]:
    return decode(encoded.data, encoded.tensors, envoy=lambda a: ("envoy", a), tracer="tracer", **more)["local"]


def round_trip(value: object) -> Any:
    return receive(send(x=value))["x"]
