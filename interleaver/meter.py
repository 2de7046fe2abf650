"""How many bytes a block has saved.

Counted is the memory that saved values hold: each storage of tensors once and whole, also where a view of it is saved.
If what is sent is more, that counts: the elements of each value. An expanded tensor holds little and sends much.
At a hand-over only what came since the last one is looked at: new saves, and the new ends of saved lists, deques and
dicts. What grows deeper inside is found by counting everything again, at most once in as many hand-overs as there are
items. So a count at a hand-over may be late or, after replacements, too high; one that is over the limit is made
again in full before anything comes of it, and so is that at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ..tracer.naming import Saved

_CHANGING = (list, deque, dict, set)
_HOLDING = (*_CHANGING, tuple, frozenset)
_AT_ONCE = 8
"""Saved containers whose length is compared at one hand-over; the others have their turn at later ones."""


class Meter:
    """The size of what one block saves."""

    def __init__(self) -> None:
        self._start()

    @property
    def total(self) -> int:
        """Bytes, as far as counted."""
        return max(self._held, self._sent)

    def _start(self) -> None:
        self._held = self._sent = 0
        self._storages: set[int] = set()
        self._senders: set[int] = set()
        self._taken = 0
        self._items = 0
        self._changing = 0
        self._since = 0
        self._growing: list[list[Any]] = []
        self._next = 0

    def update(self, saved: Sequence[Saved], limit: int) -> bool:
        """Count what was saved since the last time; whether all of it is over the limit."""
        if self._changing > len(self._growing):  # some are inside of others
            self._since += 1
            if self._since > self._items:
                self._start()
        if len(saved) > self._taken:
            self._take_new(saved)
        if self._growing:
            self._take_ends()
        if self.total <= limit:
            return False
        self._start()
        self._take_new(saved)
        return self.total > limit

    def add(self, values: Iterable[object]) -> int:
        """Count values with all that is in them; how many bytes that added."""
        before, seen = self.total, set[int]()
        todo = list(values)
        while todo:
            item = todo.pop()
            self._items += 1
            if isinstance(item, torch.Tensor):
                self._count_tensors((item,))
            elif isinstance(item, _HOLDING):
                if id(item) not in seen:
                    seen.add(id(item))
                    self._changing += isinstance(item, _CHANGING)
                    inside = item.values() if isinstance(item, dict) else item
                    if {*map(type, inside)} == {torch.Tensor}:  # the usual case
                        self._items += len(inside)
                        self._count_tensors(inside)
                    else:
                        todo.extend(inside)
            elif isinstance(item, np.ndarray):
                self._note_sent(item, item.nbytes)
                while isinstance(item.base, np.ndarray):
                    item = item.base
                self._note(item.__array_interface__["data"][0], item.nbytes)
            elif isinstance(item, bytes | bytearray | str):
                self._note(id(item), len(item))
                self._note_sent(item, len(item))
        return self.total - before

    def _take_new(self, saved: Sequence[Saved]) -> None:
        new = [entry.value for entry in islice(saved, self._taken, None)]
        self.add(new)
        self._growing += [[value, len(value)] for value in new if isinstance(value, list | deque | dict)]
        self._taken = len(saved)

    def _take_ends(self) -> None:
        growing = self._growing
        for _ in range(min(_AT_ONCE, len(growing))):
            self._next = (self._next + 1) % len(growing)
            entry = growing[self._next]
            container, known = entry
            length = len(container)
            if length != known:
                values = container.values() if isinstance(container, dict) else container
                self.add(islice(reversed(values), max(length - known, 0)))
                entry[1] = length

    def _count_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        storages, senders = self._storages, self._senders
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
            except (RuntimeError, NotImplementedError):  # a sparse tensor, or another kind without storage
                continue
            if tensor.is_meta:
                continue
            if key not in storages:
                storages.add(key)
                self._held += storage.nbytes()
            if id(tensor) not in senders:
                senders.add(id(tensor))
                self._sent += tensor.nbytes

    def _note(self, key: int, size: int) -> None:
        if key not in self._storages:
            self._storages.add(key)
            self._held += size

    def _note_sent(self, value: object, size: int) -> None:
        if id(value) not in self._senders:
            self._senders.add(id(value))
            self._sent += size


def fitting(values: Mapping[str, object], limit: int | None) -> dict[str, object]:
    """Those of some named values, in order, that are within the limit together."""
    if limit is None:
        return dict(values)
    fits: dict[str, object] = {}
    left = limit
    meter = Meter()
    for name, value in values.items():
        size = meter.add([value])
        if size <= left:
            fits[name], left = value, left - size
    return fits


def size_of(values: Iterable[object]) -> int:
    """Bytes that values hold together."""
    return Meter().add(values)
