"""A small model whose layers add the residual in place, as the fused norms of vLLM do."""

from __future__ import annotations

import torch

WIDTH = 4


class Layer(torch.nn.Module):
    """Like those of vLLM: the next one changes the residual in place."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = x
        else:
            residual.add_(x)
        return self.mlp(self.attn(residual.tanh())), residual


class Model(torch.nn.Module):
    """Three layers and an embedding."""

    again = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(x), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
            hidden = self.embed(hidden) if self.again else hidden
        return hidden + residual


class Again(Model):
    """One of its modules is called several times."""

    again = True
