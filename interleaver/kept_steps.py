"""What passes at some ports in some steps in a row, kept for blocks that have their turns later (`lagging_hub`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .structure import tensors_of
from .torch_compat import clone_each, inference_mode
from .values import is_flat

if TYPE_CHECKING:
    from ..envoy.address import Port
    from .steady_mediator import Column

_MOST_STEPS = 16
"""Steps that are kept before blocks have their turns."""

_MOST_BYTES = 64 << 20
"""What they may take; twice as much in all, since the next ones are kept while blocks go over the last."""


class Passed(NamedTuple):
    """What is kept of what passes at a port.

    Attributes:
        port: the port.
        value: what passes there, or those items of a tuple that are wanted.
        items: the places of these; None if it is all.
    """

    port: Port
    value: object
    items: Sequence[int] | None


def pick(port: Port, value: object, wants: Sequence[int] | None) -> Passed:
    """What is wanted of what passes at a port: the items of a tuple, by their places in order, or all of it (None)."""
    if wants is None or type(value) is not tuple or wants[-1] >= len(value):
        return Passed(port, value, None)
    return Passed(port, tuple([value[item] for item in wants]), wants)


class _Kept:
    """What passes at some ports at one moment of a step, in several steps.

    Attributes:
        ports: the ports, in the order of the forward.

    Tensors of one shape are kept in one piece, ``[tensors, requests, steps, ...]``, so that a step is written in one
    copy, and what belongs to one request is read in one piece.

    Args:
        passed: the ports, with what passes there.
        room: how many steps.
    """

    def __init__(self, passed: Sequence[Passed], room: int) -> None:
        tensors = [tensors_of(one.value) for one in passed]
        flat = [tensor for each in tensors for tensor in each]
        kinds: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for at, tensor in enumerate(flat):
            kinds.setdefault((tensor.shape, tensor.dtype), []).append(at)
        self._room = room
        self.bytes = sum(tensor.nbytes for tensor in flat)
        self.ports = [one.port for one in passed]
        self._pieces: list[tuple[list[int], torch.Tensor]] = []
        self._whole: list[torch.Tensor] = [*flat]
        self._rows: list[Sequence[torch.Tensor]] = [()] * len(flat)
        self._targets: dict[int, list[torch.Tensor]] = {}
        for places in kinds.values():
            one = flat[places[0]]
            piece = one.new_empty((len(places), one.shape[0], room, *one.shape[1:]))
            self._pieces.append((places, piece))
            for place, rows in zip(places, piece.unbind(0), strict=True):
                self._whole[place], self._rows[place] = rows, rows.unbind(0)
        end, self._parts = 0, {}
        for (port, value, items), each in zip(passed, tensors, strict=True):
            self._parts[port] = range(end, end + len(each)), not isinstance(value, torch.Tensor), items
            end += len(each)

    def put(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Keep a step."""
        for places, piece in self._pieces:
            if len(places) == 1:
                self._at(number)[places[0]].copy_(tensors[places[0]])
            else:
                piece.select(2, number).copy_(torch.stack([tensors[place] for place in places]))

    def put_one(self, number: int, port: Port, value: object) -> bool:
        """Keep what passes at one port in a step; False if it is of another form than in the first one."""
        places, several, items = self._parts[port]
        if items is None:
            tensors: Sequence[object] = value if is_flat(value) else [value]
            if several is isinstance(value, torch.Tensor) or len(tensors) != len(places):
                return False
        elif type(value) is tuple and len(value) > items[-1]:
            tensors = [value[item] for item in items]
        else:
            return False
        targets = self._at(number)
        for place, tensor in zip(places, tensors, strict=True):
            target = targets[place]
            if not isinstance(tensor, torch.Tensor) or target.shape != tensor.shape or target.dtype is not tensor.dtype:
                return False
            target.copy_(tensor)
        return True

    def _at(self, number: int) -> list[torch.Tensor]:
        """Where a step is kept."""
        targets = self._targets.get(number)
        if targets is None:
            targets = self._targets[number] = [whole.select(1, number) for whole in self._whole]
        return targets

    def views(
        self, port: Port, row: int, count: int, wants: frozenset[int] | None
    ) -> tuple[list[torch.Tensor], bool, Sequence[int] | None]:
        """The first steps of one request, ``[steps, ...]`` of each tensor; whether these are a tuple; and which items
        of one, if not all."""
        at, several, kept = self._parts[port]
        places, items = [*at], kept
        if kept is not None and wants is not None:
            items = tuple(wants)
            places = [places[kept.index(item)] for item in items]
        views = [self._rows[place][row] for place in places]
        if count < self._room:
            views = [view.narrow(0, 0, count) for view in views]
        return views, several, items


class Steps:
    """Some steps in a row.

    Attributes:
        room: how many there may be.
        count: how many there are.
        moments: what passes at each moment of a step: in the forward, with the logits, and with the samples.
    """

    def __init__(self) -> None:
        self.room = _MOST_STEPS
        self.count = 0
        self.moments: list[_Kept] = []
        self._kept: dict[Port, _Kept] = {}

    def keep(self, moment: int, passed: Sequence[Passed]) -> None:
        """Keep what passes at a moment of the step that is running; the moments come in order."""
        if moment == len(self.moments):
            size = sum(tensor.nbytes for one in passed for tensor in tensors_of(one.value))
            size += sum(kept.bytes for kept in self.moments)
            self.room = max(1, min(self.room, _MOST_BYTES // max(size, 1)))
            kept = _Kept(passed, self.room)
            self.moments.append(kept)
            self._kept.update(dict.fromkeys(kept.ports, kept))
        self.moments[moment].put(self.count, [tensor for one in passed for tensor in tensors_of(one.value)])

    def columns(self, ports: Sequence[Port], wants: Mapping[Port, frozenset[int] | None], row: int) -> list[Column]:
        """Copies for one request, of each port and step; those of one tensor have memory in common.

        Args:
            ports: the ports.
            wants: see `pick`.
            row: of the request.
        """
        found = [self._kept[port].views(port, row, self.count, wants.get(port)) for port in ports]
        sizes = [1] * self.count
        with inference_mode(False):
            made = iter(clone_each([view for views, _, _ in found for view in views]))
            columns: list[Column] = []
            for views, several, items in found:
                # Each piece has a version of its own.
                split = [torch.unsafe_split_with_sizes(next(made), sizes) for _ in views]
                if items is not None:
                    columns.append(dict(zip(items, split, strict=True)))
                else:
                    columns.append([*zip(*split, strict=True)] if several else split[0])
        return columns
