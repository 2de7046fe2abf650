"""Containers of the body around invokes, which all invokes of the trace use as one object.

The caller sends references to them, and their contents once: as they are when the first invoke that refers to them is
captured. Only containers that the body made itself, or saved, are shared; of the caller's other ones each invoke has a
copy, as in a trace of one prompt.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from ..envoy.envoy import Envoy
from ..envoy.errors import MisuseError
from .barrier import Barrier
from .block import Home, SharedValues
from .codec import encode

_SHARED = frozenset({list, dict, set, bytearray, deque, OrderedDict, Counter, defaultdict})
_AROUND = frozenset({tuple, frozenset})
_BOTH = _SHARED | _AROUND


class Sharing:
    """The shared containers of one trace.

    Args:
        owner: the Envoy of the whole model that is traced.
        theirs: the caller's variables that the body reads; containers in these are not shared.

    Attributes:
        batches: the containers as they are sent, in the order in which blocks met them.
        uses: what functions in them may touch of the process.
    """

    def __init__(self, owner: Envoy, theirs: Iterable[object]) -> None:
        self.batches: list[SharedValues] = []
        self.uses: frozenset[str] = frozenset()
        self._owner = owner
        self._theirs = {id(item): item for item in _containers(theirs)}
        self._candidates: dict[int, object] = {}
        self._keys: dict[int, str] = {}
        self._objects: dict[str, Any] = {}
        self._before: dict[str, list[object]] = {}
        self._copied: set[int] = set()
        self._new: list[str] = []
        self._barriers: dict[str, dict[str, int]] = {}
        self._met: dict[str, int] = {}

    def save(self, value: object) -> None:
        """A value was saved in the body: its containers are shared, whoever made them.

        Raises:
            MisuseError: an invoke has taken a copy of one before.
        """
        for item in _containers([value]):
            if id(item) in self._copied:
                raise MisuseError(
                    f"the {type(item).__name__} saved here was made before the trace, and an invoke has captured a "
                    "copy of it already: its changes would not be in what is saved. Save it before the first invoke."
                )
            self._theirs.pop(id(item), None)
            self._candidates[id(item)] = item

    def consider(self, values: Iterable[object]) -> None:
        """These values are variables of the body: their containers are shared once a block refers to them."""
        for value in values:
            if type(value) in _SHARED:
                self._candidates[id(value)] = value
            elif type(value) in _AROUND:
                self._candidates.update((id(item), item) for item in _containers([value]))

    def key(self, value: object) -> str | None:
        """The key of a shared container; None for anything else. Called for every object that is sent."""
        if type(value) not in _SHARED:
            return None
        if id(value) not in self._keys:
            if id(value) in self._theirs:
                self._copied.add(id(value))
                return None
            if id(value) not in self._candidates:
                return None
            for item in _containers([value]):
                if id(item) not in self._theirs and id(item) not in self._keys:
                    self._register(item)
        key = self._keys[id(value)]
        self._met |= self._barriers[key]
        return key

    def settle(self) -> tuple[tuple[str, int], ...]:
        """Encode what the invoke just captured has brought in; returns the barriers in what it refers to.

        Raises:
            TransferError: something in it cannot be sent.
        """
        barriers: dict[str, int] = {}
        while self._new:
            new, self._new = self._new, []
            contents = {key: copy.copy(self._objects[key]) for key in new}
            empty = {key: copy.copy(value) for key, value in contents.items()}
            for value in empty.values():
                value.clear()
            encoded = encode({"shared": contents}, self._owner, self.key)
            self.batches.append(
                SharedValues(encode({"shared": empty}, self._owner).data, encoded.data, encoded.tensors)
            )
            barriers.update(encoded.barriers)
            self.uses |= encoded.uses
        barriers |= self._met  # also those in containers that others refer to
        self._met = {}
        return tuple(barriers.items())

    def check_unchanged(self, scope: Mapping[str, object]) -> None:
        """Refuse changes that the body made after a block had captured the container.

        Raises:
            MisuseError: there is one; it names the variable of `scope`.
        """
        for key, value in self._objects.items():
            now = _items(value)
            before = self._before[key]
            if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
                continue
            name = next((f"`{name}`" for name, held in scope.items() if held is value), f"a {type(value).__name__}")
            raise MisuseError(
                f"{name} was changed in the body around the invokes after an invoke had captured it. All invokes share "
                "one object, which starts as it was then, so the change would come at another time than it stands. "
                "Change it in the invokes, or make a new one for each of them."
            )

    def home(self, saved: Mapping[str, object]) -> Home | None:
        """What comes home from the engine of the values that the body saved, for the block that ends last."""
        values = {name: value for name, value in saved.items() if self.shares(value)}
        if not values:
            return None
        encoded = encode({"home": values}, self._owner, self.key)
        self.settle()  # containers that no block uses, around others
        return Home(encoded.data, encoded.tensors)

    def shares(self, value: object) -> bool:
        """Whether a shared container is in `value`."""
        return any(id(item) in self._keys for item in _containers([value]))

    def _register(self, value: object) -> None:
        key = str(len(self._objects))
        self._keys[id(value)] = key
        self._objects[key] = value
        self._before[key] = _items(value)
        self._new.append(key)
        self._barriers[key] = _barriers(value)


def _items(value: Any) -> list[object]:
    if isinstance(value, bytearray):
        return list(value)
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _barriers(value: object) -> dict[str, int]:
    """The barriers in a container and everything inside of it, each with the number of blocks that meet there."""
    insides = (_items(inside) for inside in _within([value]) if type(inside) is not bytearray)
    return {item.key: item.count for items in insides for item in items if isinstance(item, Barrier)}


def _containers(values: Iterable[object]) -> list[object]:
    """The containers of the kinds that can be shared among the values and everything inside of them."""
    return [container for container in _within(values) if type(container) in _SHARED]


def _within(values: Iterable[object]) -> list[object]:
    """All containers among the values and everything inside of them."""
    found: dict[int, object] = {}
    todo = [value for value in values if type(value) in _BOTH]
    while todo:
        value = todo.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        items = _items(value) if not isinstance(value, bytearray) else []
        if not {*map(type, items)}.isdisjoint(_BOTH):  # long lists of numbers are usual
            todo.extend(item for item in items if type(item) in _BOTH)
    return list(found.values())
