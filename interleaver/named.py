"""Which variables of a block hold what it saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .mediator import Saved


def named(scope: Mapping[str, object], saved: Iterable[Saved]) -> dict[str, object]:
    """Saved values by the names that hold them.

    Objects are recognised by identity; numbers and strings, of which Python shares equal ones, by the name that the
    saving statement gave them.
    """
    entries = list(saved)
    by_identity = {id(entry.value) for entry in entries if not _shared(entry.value)}
    found = {name: value for name, value in scope.items() if id(value) in by_identity}
    for entry in entries:
        for name in entry.names:
            if name in scope and scope[name] is entry.value:
                found[name] = entry.value
    return found


def _shared(value: object) -> bool:
    """Whether Python may use one object for equal values of this kind."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple | torch.dtype)
