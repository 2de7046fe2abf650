"""The ranks of a model that is split, as one of them sees the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ..envoy.address import Port


class Ranks(Protocol):
    """Every method is one exchange, which all ranks must come to in the same order.

    Attributes:
        rank: the number of this one.
        size: how many there are.
    """

    rank: int
    size: int

    def gather(self, tensor: torch.Tensor, port: Port | None = None) -> list[torch.Tensor]:
        """The tensors of all ranks, which have the same shape; `port` is what they are of."""
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

    def gather(self, tensor: torch.Tensor, port: Port | None = None) -> list[torch.Tensor]:
        """See `Ranks`. As bytes: not every way takes every dtype."""
        raw = tensor.contiguous().view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in range(self.size)]
        torch.distributed.all_gather(parts, raw, group=self._tensors)
        self.sent[port] += raw.nbytes * (self.size - 1)
        return [part.view(tensor.dtype) for part in parts]

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
