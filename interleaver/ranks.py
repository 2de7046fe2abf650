"""The ranks of a model that is split, as one of them sees the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .torch_compat import gather_flat

if TYPE_CHECKING:
    from ..envoy.address import Port


class Pieces(NamedTuple):
    """A tensor that is not in one piece.

    Attributes:
        pieces: its parts.
        dim: along which they follow each other.
    """

    pieces: Sequence[torch.Tensor]
    dim: int = 0

    @property
    def shape(self) -> list[int]:
        """Of the tensor."""
        shape = [*self.pieces[0].shape]
        if shape:
            shape[self.dim] = sum(piece.shape[self.dim] for piece in self.pieces)
        return shape

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    def joined(self) -> torch.Tensor:
        """The tensor."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat([*self.pieces], self.dim)

    def put(self, target: torch.Tensor) -> None:
        """Copy it; nothing else is allocated."""
        start = 0
        for piece in self.pieces:
            length = piece.shape[self.dim] if piece.dim() else 0
            (target.narrow(self.dim, start, length) if piece.dim() else target).copy_(piece)
            start += length


class Ranks(Protocol):
    """Every method is one exchange, which all ranks must come to in the same order.

    Attributes:
        rank: the number of this one.
        size: how many there are.
    """

    rank: int
    size: int

    def fits(self, tensors: Sequence[Pieces]) -> bool:
        """Whether there is room to gather these; the same on all ranks."""
        ...

    def make_room(self, tensors: Sequence[Pieces]) -> None:
        """Allocate what gathering these takes; no exchange."""
        ...

    def drop_room(self) -> None:
        """Give the room back."""
        ...

    def gather(self, tensors: Sequence[Pieces], port: Port | None = None) -> list[list[torch.Tensor]]:
        """The tensors of each rank, in memory that the next call uses again.

        Args:
            tensors: of this rank; their shapes are the same on all. There is room for them.
            port: what they are of.
        """
        ...

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, as many of each."""
        ...

    def exchange_any(self, value: object) -> list[Any]:
        """Whatever the ranks have to say."""
        ...


class GroupRanks:
    """Those of a group of torch's processes; implements `Ranks`.

    Args:
        group: for what is small.
        tensors: for tensors, where these are on a device; else they take the other way, too.

    Attributes:
        sent: how many bytes this rank has sent to others, by port; under None, those of agreements.
    """

    def __init__(self, group: Any, tensors: Any = None) -> None:
        self._group = group
        self._tensors = tensors if tensors is not None else group
        self.rank = int(torch.distributed.get_rank(group))
        self.size = int(torch.distributed.get_world_size(group))
        self.sent: Counter[Port | None] = Counter()
        self._room: torch.Tensor | None = None

    def fits(self, tensors: Sequence[Pieces]) -> bool:
        """See `Ranks`."""
        return self._room is not None and self._room.nbytes >= (1 + self.size) * _ends(tensors)[-1]

    def make_room(self, tensors: Sequence[Pieces]) -> None:
        """See `Ranks`."""
        self._room = None
        device = tensors[0].pieces[0].device
        with torch.inference_mode(False):  # so that it can be written outside of one, too
            self._room = torch.empty((1 + self.size) * _ends(tensors)[-1], dtype=torch.uint8, device=device)

    def drop_room(self) -> None:
        """See `Ranks`."""
        self._room = None

    def gather(self, tensors: Sequence[Pieces], port: Port | None = None) -> list[list[torch.Tensor]]:
        """See `Ranks`. As bytes: not every way takes every dtype."""
        assert self._room is not None, "it was made"
        ends = _ends(tensors)
        size = ends[-1]
        mine, everyone = self._room[:size], self._room[size : (1 + self.size) * size]
        for tensor, target in zip(tensors, _views(mine, tensors, ends), strict=True):
            tensor.put(target)
        gather_flat(everyone, mine, group=self._tensors)
        self.sent[port] += size * (self.size - 1)
        return [_views(part, tensors, ends) for part in everyone.view(self.size, size).unbind()]

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Ranks`."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(parts, mine, group=self._group)
        self.sent[None] += mine.nbytes * (self.size - 1)
        found: list[list[int]] = [part.tolist() for part in parts]
        return found

    def exchange_any(self, value: object) -> list[Any]:
        """See `Ranks`. The ranks are processes of one engine, which trust each other as vLLM's do."""
        parts: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(parts, value, group=self._group)
        return parts


_ALIGNED = 16
"""Every tensor begins at a multiple of this many bytes, so that it can be seen as one of its dtype."""


def _ends(tensors: Sequence[Pieces]) -> list[int]:
    """Where each tensor ends, if they are one behind the other."""
    return [*accumulate(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)]


def _views(data: torch.Tensor, tensors: Sequence[Pieces], ends: Sequence[int]) -> list[torch.Tensor]:
    """Bytes as tensors of the shapes of these."""
    return [
        data[start : start + tensor.nbytes].view(tensor.pieces[0].dtype).view(tensor.shape)
        for tensor, start in zip(tensors, [0, *ends[:-1]], strict=True)
    ]
