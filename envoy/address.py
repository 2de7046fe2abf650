"""Addresses of modules and ports, and how they are shown.

An address is a dotted module path as in `torch.nn.Module.named_modules`; the root is ``""``. A port is a pair of an
address and a kind; `.input` and `.inputs` of a module are one port, since they come at the same instant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

INPUT = "input"
OUTPUT = "output"
LOGITS = "logits"
SAMPLES = "samples"


class Port(NamedTuple):
    """Where a block can meet the model: `kind` is one of ``input``, ``output``, ``logits``, ``samples``."""

    address: str
    kind: str

    def __str__(self) -> str:
        return f"{self.address}.{self.kind}" if self.address else f"model.{self.kind}"


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
