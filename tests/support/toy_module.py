"""A module of a few layers, for what needs no language model."""

from __future__ import annotations

import torch


class Keywords(torch.nn.Module):
    """Takes its arguments by name; their order and the number among them matter."""

    def forward(self, *, one: torch.Tensor, other: torch.Tensor, factor: int) -> torch.Tensor:
        return one - factor * other


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.named = Keywords()
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.last(self.named(one=x, other=2 * x, factor=3))
        return out
