"""Changes to the caller's objects that will not come home.

A block works on copies of what it captured. Appending to a list of the caller, setting an attribute of an object, or
calling a function that changes a variable around it, without saving it, is nearly always a mistake; a `Snapshot`
notices. What changes by itself is left alone: loggers, which are no copies and note what they are asked for, and
properties that keep what they have computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from logging import Logger
from types import CellType, FunctionType, ModuleType

import torch

from ..envoy.envoy import Envoy
from ..tracer.block import TracerHandle
from ..tracer.naming import Saved
from .torch_compat import version_of

_LASTING = (type, ModuleType, Envoy, TracerHandle, Logger)
_CHANGING = (list, dict, set, deque, bytearray, torch.Tensor)
_HOLDING = (list, tuple, set, frozenset, deque)
_LIMIT = 10_000
_DEPTH = 4


class Snapshot:
    """The contents of captured variables before the block ran.

    Args:
        values: the variables.
        shared: identities of objects that the blocks of a trace share: their changes are not lost.
    """

    def __init__(self, values: Mapping[str, object], shared: Collection[int] = ()) -> None:
        self._shared = shared
        self._values = {name: value for name, value in values.items() if _mutable(value) and id(value) not in shared}
        self._before = {name: _contents(value, shared) for name, value in self._values.items()}

    def lost(self, saved: Iterable[Saved]) -> list[str]:
        """A message for each variable that was changed and is not in what was saved."""
        changed = {
            name: value
            for name, value in self._values.items()
            if not _same(self._before[name], _contents(value, self._shared))
        }
        kept = {id(item) for entry in saved for item in _reachable(entry.value)} if changed else ()
        return [_message(name, value) for name, value in changed.items() if id(value) not in kept]


def _message(name: str, value: object) -> str:
    if isinstance(value, FunctionType):
        return (
            f"`{name}` changed a variable around it in the block, but the change stays there: the block works on a "
            f"copy of the function. Have `{name}` return the value, and save that."
        )
    if hasattr(value, "__dict__") and not isinstance(value, list | dict | set | torch.Tensor):
        return (
            f"`{name}` was changed in the block, but the change stays there: the block works on a copy. Save the new "
            f"value under a name of its own (`h = x.save()`), and put it into `{name}` after the `with`."
        )
    return (
        f"`{name}` was changed in the block, but the change stays there: the block works on a copy. "
        f"Write `{name}.save()` in the block to get it back."
    )


def _mutable(value: object) -> bool:
    if isinstance(value, FunctionType):
        return bool(value.__closure__)
    if isinstance(value, _LASTING):
        return False
    return isinstance(value, _CHANGING) or hasattr(value, "__dict__")


def _parts(value: object) -> list[object] | None:
    if isinstance(value, _HOLDING):
        return list(value)
    if isinstance(value, FunctionType):
        return [item for cell in value.__closure__ or () for item in _content(cell)]
    if isinstance(value, dict):
        return [item for pair in value.items() for item in pair]
    if _mutable(value) and not isinstance(value, torch.Tensor | torch.nn.Module | bytearray):
        return [item for pair in vars(value).items() if not _computed(type(value), pair[0]) for item in pair]
    return None


def _computed(kind: type, name: str) -> bool:
    """Whether an attribute is what a property has computed and kept."""
    return any(isinstance(base.__dict__.get(name), cached_property) for base in kind.__mro__)


def _content(cell: CellType) -> tuple[object, ...]:
    """What a variable of a function's surroundings holds; nothing if it is not bound."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _reachable(value: object) -> list[object]:
    found: list[object] = []
    seen: set[int] = set()
    todo = [value]
    while todo and len(found) < _LIMIT:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        found.append(item)
        todo.extend(_parts(item) or ())
    return found


def _contents(value: object, shared: Collection[int], depth: int = _DEPTH) -> list[object]:
    """The value's parts, flattened to a bounded depth; tensors with their version, shared objects as such."""
    if id(value) in shared:
        return [value]
    if isinstance(value, torch.Tensor):
        return [value, -1 if value.is_inference() else version_of(value)]
    if isinstance(value, bytearray):
        return [bytes(value)]
    parts = _parts(value)
    if parts is None or depth == 0:
        return [value]
    return [value, len(parts), *(item for part in parts[:_LIMIT] for item in _contents(part, shared, depth - 1))]


def _same(before: list[object], after: list[object]) -> bool:
    return len(before) == len(after) and all(
        one is other or (isinstance(one, int | bytes) and type(one) is type(other) and one == other)
        for one, other in zip(before, after, strict=True)
    )
