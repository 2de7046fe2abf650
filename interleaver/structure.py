"""The structures that modules take and give: containers, and the tensors in them.

Containers are tuples, lists, dicts, their subclasses, dataclasses, and what stands for lists and dicts in Python's
library. A block gets copies of them, and what it changed goes back by its place. Objects of other classes are the
model's own: only their class knows what is in them.
"""

from __future__ import annotations

import copy
from collections import UserList, deque
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
import torch

from ..envoy.errors import UnsupportedError

Leaves: TypeAlias = list[torch.Tensor]
Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Other: TypeAlias = Callable[[object], object]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device})
"""Classes of what has nothing in it and cannot be changed."""


def map_tensors(value: object, change: Change, other: Other | None = None) -> object:
    """The same structure with every tensor changed.

    Args:
        value: the structure.
        change: makes another tensor of one.
        other: makes something of what is no container or tensor; else that is kept as it is.

    Raises:
        UnsupportedError: a container cannot be copied, or contains itself.
    """
    try:
        return _map(value, change, other)
    except RecursionError:
        raise UnsupportedError(
            f"a {type(value).__name__} that contains itself has no end, so no copy of it can be made."
        ) from None


def tensors_of(value: object) -> Leaves:
    """All tensors of a structure, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: Leaves = []
    map_tensors(value, noted_in(found))
    return found


def noted_in(found: Leaves) -> Change:
    """A change for `map_tensors` that changes nothing and notes the tensors."""

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    return note


def own(value: object) -> object:
    """What a block gets of something that is no container or tensor: its own copy if it is an array or a set.

    Raises:
        UnsupportedError: it gives values that are the model's own, with no place to which edits could go back.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Iterator | ValuesView | ItemsView):
        raise UnsupportedError(
            f"the value here is or has in it a {_name(value)}: to look at what it gives, a block would have to take "
            "it from the model. Read the ports of the modules around it or inside of it."
        )
    if isinstance(value, set | frozenset):
        if tensors_of([*value]):
            raise UnsupportedError(
                f"the value here is or has in it a {_name(value)} of tensors, which have no order in it, so that edits "
                "could not go back to their places. Read the ports of the modules around it or inside of it."
            )
        return copy.copy(value)
    return value


def can_change(value: object) -> bool:
    """Whether a structure has anything in it that can be changed, other than its tensors."""
    if isinstance(value, tuple):
        return any(map(can_change, value))
    return is_listing(value) or isinstance(value, Mapping | np.ndarray | set) or is_record(value)


def is_listing(value: object) -> TypeGuard[list[Any]]:
    """Whether a value is a list, or what stands for one in Python's library."""
    return isinstance(value, list | UserList | deque)


def is_record(value: object) -> bool:
    """Whether a value is an object of a dataclass; modules are none, which take their state along."""
    return is_dataclass(value) and not isinstance(value, type | torch.nn.Module)


def parts_of(record: object) -> dict[str, object]:
    """The fields of an object of a dataclass, as far as they are set."""
    names = [field.name for field in fields(cast(Any, record))]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _map(value: object, change: Change, other: Other | None) -> object:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [_map(item, change, other) for item in value]
        return tuple(items) if kind is tuple else _made(value, lambda: _tuple_like(value, items))
    if kind is list:
        return [_map(item, change, other) for item in cast("list[object]", value)]
    if is_listing(value):
        items = [_map(item, change, other) for item in value]
        return _made(value, lambda: _list_like(value, items))
    if isinstance(value, Mapping):
        by_key = {key: _map(item, change, other) for key, item in value.items()}
        return by_key if kind is dict else _made(value, lambda: _mapping_like(value, by_key))
    if is_record(value):
        parts = {name: _map(part, change, other) for name, part in parts_of(value).items()}
        return _made(value, lambda: _record_like(value, parts))
    return value if other is None else other(value)


def _made(value: object, make: Callable[[], object]) -> object:
    """What is made of a container, whose class may have its own ideas about that."""
    try:
        return make()
    except Exception as error:
        raise UnsupportedError(
            f"the value here is or has in it a {_name(value)}, of which no copy can be made ({type(error).__name__}: "
            f"{error}). Read the ports of the modules around it or inside of it."
        ) from error


def _tuple_like(value: tuple[object, ...], items: Sequence[object]) -> object:
    kind = type(value)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types
        return kind(items)
    same = tuple.__new__(kind, items)  # named tuples and others, whatever their own `__new__` takes
    if hasattr(value, "__dict__"):
        vars(same).update(vars(value))
    return same


def _list_like(value: list[object], items: Sequence[object]) -> object:
    same = copy.copy(value)
    for at, item in enumerate(items):
        same[at] = item
    return same


def _mapping_like(value: Mapping[Any, object], by_key: dict[Any, object]) -> object:
    kind = cast(Any, type(value))
    if isinstance(value, dict) and hasattr(kind, "to_tuple"):  # a transformers ModelOutput
        return kind(**by_key)
    if isinstance(value, MutableMapping):
        same = copy.copy(value)
        for key, item in by_key.items():
            same[key] = item
        return same
    return kind(by_key)


def _record_like(value: object, parts: Mapping[str, object]) -> object:
    same = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(same, name, part)  # frozen ones have another
    return same


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
