"""Addresses of modules and ports, and how they are shown.

An address is a dotted module path as in `torch.nn.Module.named_modules`; the root is ``""``. A port is a pair of an
address and a kind; `.input` and `.inputs` of a module are one port, since they come at the same instant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cache

INPUT = "input"
OUTPUT = "output"
LOGITS = "logits"
SAMPLES = "samples"


class Port:
    """Where a block can meet the model. There is one object per port (`port_at`), so ports are told by identity.

    Attributes:
        address: the module's; ``""`` for logits and samples.
        kind: one of ``input``, ``output``, ``logits``, ``samples``.
        of_step: it belongs to the step and not to a module (logits and samples).
    """

    __slots__ = ("address", "kind", "of_step")

    def __init__(self, address: str, kind: str) -> None:
        self.address = address
        self.kind = kind
        self.of_step = kind in (LOGITS, SAMPLES)

    def __repr__(self) -> str:
        return f"port_at({self.address!r}, {self.kind!r})"

    def __str__(self) -> str:
        return f"{self.address}.{self.kind}" if self.address else f"model.{self.kind}"


port_at = cache(Port)
"""The port of a kind at an address."""


def join(address: str, name: str) -> str:
    """Address of the child `name` of the module at `address`."""
    return f"{address}.{name}" if address else name


def shown(address: str) -> str:
    """The address as messages show it."""
    return address or "the model"


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three of the `known` names that look like `name`, best first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)


def suggestion(name: str, known: Sequence[str]) -> str:
    """`` Did you mean `a` or `b`?``, or the list of what there is, for the end of a message."""
    close = nearest(name, known)
    if close:
        return " Did you mean " + " or ".join(f"`{match}`" for match in close) + "?"
    if not known:
        return " It has no modules inside."
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f" It has: {listed}."
