"""A toy model with a hub, and a flat batch that is made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invivo.envoy.address import LOGITS, SAMPLES, port_at
from invivo.envoy.envoy import RootEnvoy
from invivo.interleaver.hub import Hub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import Share, shares

Body = Callable[[Any, Mediator], dict[str, object]]


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Batch:
    """A model with a hub, and the blocks of some requests."""

    def __init__(self, make: Callable[[], Any] = Toy) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.hub = Hub(self.model)
        self.envoy: Any = RootEnvoy(self.hub.tree, "")

    def add(self, request: str, body: Body, turns: Turns | None = None) -> Mediator:
        mediator = Mediator(self.hub.tree, turns or Turns(0, None), lambda mediator: body(self.envoy, mediator))
        self.hub.add(request, mediator, 10)
        return mediator

    def step(self, rows: torch.Tensor, split: dict[str, Share]) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, logits and samples of one engine step."""
        with torch.inference_mode():
            self.hub.begin(split)
            out = self.model(rows)
            self.hub.forward_done()
            logits = torch.arange(float(len(split) * 10)).reshape(len(split), 10)
            replaced: Any = self.hub.fire(port_at("", LOGITS), logits)
            logits = logits if replaced is None else replaced
            samples = logits.argmax(-1)
            replaced = self.hub.fire(port_at("", SAMPLES), samples)
            self.hub.finish_step()
        return out, samples if replaced is None else replaced


def split(*counts: int) -> dict[str, Share]:
    """Whole prompts of requests a, b, c, ..., one after the other."""
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return shares("abcdef"[: len(counts)], starts, [0] * len(counts), counts, starts[-1])
