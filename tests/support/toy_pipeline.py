"""Two stages of a toy model in one process, for tests of what stages tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from invivo.envoy.address import LOGITS, SAMPLES, port_at
from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.tree import ModuleTree
from invivo.interleaver.group import Member
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.staged_hub import StagedHub
from invivo.interleaver.staged_mediator import StagedMediator
from invivo.interleaver.stages import Places
from invivo.interleaver.windows import shares

ROWS = 3
Body = Callable[[Any, Mediator, int], dict[str, object]]


class PPMissingLayer(torch.nn.Identity):
    """What vLLM puts in the place of a layer of another stage."""


class Part(torch.nn.Module):
    """Two of four layers; each doubles what it gets."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.own = range(2 * stage, 2 * stage + 2)
        self.layers = torch.nn.ModuleList(Double() if at in self.own else PPMissingLayer() for at in range(4))
        self.head = Double() if stage else PPMissingLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.own:
            x = self.layers[at](x)
        return x


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Stages:
    """One stage as another one sees it: its messages are kept."""

    size = 2

    def __init__(self, rank: int, said: dict[int, object]) -> None:
        self.rank = rank
        self._said = said

    def gather(self, tensor: torch.Tensor, port: object = None) -> list[torch.Tensor]:
        raise AssertionError("stages exchange no tensors")

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        raise AssertionError("nor numbers")

    def exchange_any(self, value: object) -> list[Any]:
        self._said[self.rank] = value
        return [self._said.get(number) for number in range(2)]


class Pipeline:
    """Both stages; a body is given the model, its mediator and the number of the stage that it runs in."""

    def __init__(self) -> None:
        self.models = [Part(stage) for stage in range(2)]
        trees = [ModuleTree.of(model).modules for model in self.models]
        said: dict[int, object] = {}
        self.hubs: list[StagedHub] = []
        for stage, model in enumerate(self.models):
            hub = StagedHub(model)
            others: Any = Stages(stage, said)
            hub.set_stage(model, Places(stage, trees), others)
            self.hubs.append(hub)
        self.back: dict[str, bytes] = {}
        self.computed: dict[str, int] = {}

    def add(self, request: str, body: Body, members: Sequence[Member] | None = None) -> tuple[Mediator, Mediator]:
        """Take in a request; its block has these places among others, one in each stage."""
        found = []
        for stage, hub in enumerate(self.hubs):
            envoy: Any = RootEnvoy(hub.tree, "")
            mediator = StagedMediator(
                hub.tree, Turns(0, None), lambda own, envoy=envoy, stage=stage: body(envoy, own, stage)
            )
            if members is not None:
                mediator.member, mediator.index = members[stage], members[stage].index
                members[stage].mediator = mediator
            hub.add(request, mediator, 10)
            found.append(mediator)
        self.computed[request] = 0
        return found[0], found[1]

    def step(self, *requests: str) -> torch.Tensor:
        """One step of these requests, or of all."""
        names = [*(requests or self.computed)]
        rows = [1 if self.computed[name] else ROWS for name in names]
        starts = [sum(rows[:at]) for at in range(len(rows) + 1)]
        split = shares(names, starts, [self.computed[name] for name in names], [ROWS] * len(names), starts[-1])
        x = torch.ones(starts[-1], 2)
        first, last = self.hubs
        with torch.inference_mode():
            first.hear_back(self.back)
            first.begin(split)
            x = self.models[0](x)
            first.forward_done()
            first.finish_step()
            last.hear(first.tell())
            last.begin(split)
            x = self.models[1](x)
            last.forward_done()
            logits = last.fire(port_at("", LOGITS), x[[end - 1 for end in starts[1:]]])
            last.fire(port_at("", SAMPLES), torch.arange(len(names)))
            last.finish_step()
        self.back = last.tell_back()
        for name, count in zip(names, rows, strict=True):
            self.computed[name] += count
        return x if logits is None else torch.cat([x, logits])  # type: ignore[list-item]

    def end(self, request: str) -> None:
        for hub in reversed(self.hubs):
            hub.meet_at_end(request)
        for hub in self.hubs:
            with torch.inference_mode():
                hub.end(request, None)
            hub.remove(request)
            if not hub.mediators:
                hub.check_integrity()

    def failure_of(self, body: Body, steps: int = 1) -> BaseException | None:
        """What ends a block in the last stage, where its reply is made."""
        _, last = self.add("a", body)
        for _ in range(steps):
            self.step()
        failure = last.failure
        self.end("a")
        return failure
