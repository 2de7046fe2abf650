"""What blocks hold on a GPU is bounded; the GPU is made up, and its tensors are the CPU's."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch

from invivo.envoy.address import LOGITS, port_at
from invivo.envoy.errors import MemoryLimitError
from invivo.interleaver.device import DeviceLimit
from invivo.interleaver.hub import Hub
from invivo.interleaver.limits import Limits
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import Share, Window

MIB = 1 << 20


class Gpu:
    def __init__(self, available: int = 100 * MIB) -> None:
        self.used, self.free = 5 * MIB, available
        self.asked = 0

    def allocated(self) -> int:
        self.asked += 1
        return self.used

    def available(self) -> int:
        return self.free


def tensor(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB, dtype=torch.uint8)


class Thing:
    def __init__(self) -> None:
        self.inside = {"x": [tensor(2)]}


def waiting(body: Any) -> tuple[Hub, Mediator]:
    """A block that waits for the next step."""
    hub = Hub(torch.nn.Identity())
    mediator = Mediator(hub.tree, Turns(0, None), body, Limits(memory=1 << 40))
    hub.add("a", mediator, 10)
    hub.begin({"a": Share(Window(0, 1, 1), Window(0, 1, 1), 0)})
    hub.forward_done()
    hub.fire(port_at("", LOGITS), torch.zeros(1, 10))
    hub.finish_step()
    return hub, mediator


def limit(share: float, gpu: Gpu) -> DeviceLimit:
    made = DeviceLimit(share, gpu, lambda tensor: True)
    made.begin()
    return made


def test_every_tensor_that_a_waiting_block_can_reach_counts_once() -> None:
    def body(mediator: Mediator) -> dict[str, object]:
        mediator.read(port_at("", LOGITS), "output")
        one = tensor(1)
        seen = [one, (one[5:], deque([tensor(1)]))]
        thing = Thing()
        mediator.advance(1)
        return {"seen": seen, "thing": thing}

    gpu = Gpu()
    hub, mediator = waiting(body)
    bound = limit(3 * MIB, gpu)
    gpu.used += 4 * MIB
    (error,) = bound.over(hub.mediators).values()
    assert str(error).startswith("the block holds 4.0 MiB of the GPU's memory, and the limit is 3.0 MiB.")
    hub.end_over("a", error)
    assert mediator.done and mediator.failure is error and hub.ended == {"a"}


def test_one_that_catches_it_and_goes_on_is_ended() -> None:
    def body(mediator: Mediator) -> dict[str, object]:
        kept = tensor(4)
        mediator.read(port_at("", LOGITS), "output")
        for step in range(1, 9):
            with contextlib.suppress(MemoryLimitError):
                mediator.advance(step)
        return {"kept": kept}

    gpu = Gpu()
    hub, mediator = waiting(body)
    bound = limit(3 * MIB, gpu)
    gpu.used += 4 * MIB
    ((name, error),) = bound.over(hub.mediators).items()
    hub.end_over(name, error)
    assert mediator.done and isinstance(mediator.failure, MemoryLimitError)


def test_blocks_are_looked_at_only_when_the_gpu_has_grown_by_the_limit() -> None:
    def body(mediator: Mediator) -> dict[str, object]:
        kept = tensor(40)
        mediator.read(port_at("", LOGITS), "output")
        mediator.advance(1)
        return {"kept": kept}

    gpu = Gpu()
    hub, one = waiting(body)
    other, _ = waiting(lambda mediator: {"nothing": mediator.advance(1)})
    blocks = {"a": one, "b": other.mediators["a"]}
    half = limit(0.5, gpu)
    gpu.used += 49 * MIB
    assert half.over(blocks) == {}
    gpu.used += 5 * MIB  # over half of what there was; no block has as much
    assert half.over(blocks) == {} and half._look > 54 * MIB
    gpu.used += 50 * MIB  # hardly anything is left for the engine
    ((name, error),) = half.over(blocks).items()
    assert name == "a" and "with other blocks" in str(error)
    alone = limit(0.5, gpu)
    gpu.used += 51 * MIB
    assert "holds 51.0 MiB" in str(alone.over(hub.mediators)["a"])
    hub.remove("a"), other.remove("a")
