"""How the parts of a tensor that several ranks hold make the whole, and the other way round.

A layer that is split over ranks gives every rank some columns (or heads) of what it computes. What a model of one rank
would have is those columns in another order: a merged layer has a piece for each of its projections, and each rank has
a part of every piece. Plain tensor arithmetic; who the ranks are, and which layer is split how, is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """One projection's columns.

    Attributes:
        width: columns of it that each rank has.
        replicas: how many ranks next to each other have the same ones (key-value heads, when there are more ranks).
    """

    width: int
    replicas: int = 1


class Layout(NamedTuple):
    """What one rank's part of a tensor is.

    Attributes:
        dim: the dimension that is split, counted from the end.
        pieces: what is along it, in order; nothing where each rank has the whole tensor, or a part of a sum.
        summed: the ranks' tensors have to be added up.
        last: size of the last dimension, where only tensors with that one are laid out so.
    """

    dim: int = -1
    pieces: tuple[Piece, ...] = ()
    summed: bool = False
    last: int | None = None

    @property
    def whole(self) -> bool:
        """Each rank has all of the tensor."""
        return not self.pieces and not self.summed

    @property
    def part(self) -> int:
        """Size of one rank's part along `dim`."""
        return sum(piece.width for piece in self.pieces)

    def total(self, ranks: int) -> int:
        """Size of the whole along `dim`."""
        return sum(piece.width * ranks // piece.replicas for piece in self.pieces)

    def fits(self, shape: Sequence[int], ranks: int, *, whole: bool = False) -> bool:
        """Whether a tensor of this shape can be a rank's part (or else the whole) of this layout."""
        if len(shape) <= -self.dim or (self.last is not None and shape[-1] != self.last):
            return False
        return shape[self.dim] == (self.total(ranks) if whole else self.part)

    def shape(self, shape: torch.Size, ranks: int) -> torch.Size:
        """The shape of the whole whose parts have this shape."""
        if not self.pieces:
            return shape
        sizes = list(shape)
        sizes[self.dim] = self.total(ranks)
        return torch.Size(sizes)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole.

        Args:
            parts: that of each rank.
        """
        if self.summed:
            whole = parts[0].clone()
            for part in parts[1:]:
                whole += part
            return whole
        if not self.pieces:
            return parts[0]
        cut = [torch.split(part, [piece.width for piece in self.pieces], self.dim) for part in parts]
        return torch.cat(
            [
                cut[rank][number]
                for number, piece in enumerate(self.pieces)
                for rank in range(0, len(parts), piece.replicas)
            ],
            self.dim,
        )

    def cut(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """The part that a rank has of a whole. Of a sum, the first one has everything."""
        if self.summed:
            return whole if rank == 0 else torch.zeros_like(whole)
        if not self.pieces:
            return whole
        parts = []
        start = 0
        for piece in self.pieces:
            parts.append(whole.narrow(self.dim, start + rank // piece.replicas * piece.width, piece.width))
            start += piece.width * ranks // piece.replicas
        return torch.cat(parts, self.dim)


WHOLE = Layout()
"""Each rank has the whole tensor."""

SUMMED = Layout(summed=True)
"""The ranks' tensors have to be added up."""
