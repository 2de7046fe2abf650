"""A model that fails on what a block has put into it: the block ends, and the forward runs again without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from invivo.envoy.address import INPUT, LOGITS, OUTPUT, port_at
from invivo.envoy.errors import PreemptedError, WriteError
from invivo.interleaver.deferring_hub import DeferringHub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import shares

IDS, FIRST, LAST = port_at("embed", INPUT), port_at("layers.0", OUTPUT), port_at("layers.1", OUTPUT)
LOOK = port_at("", LOGITS)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


Body = Callable[[Mediator], object]


def run(*bodies: Body, steps: int = 3) -> tuple[DeferringHub, list[Mediator], list[torch.Tensor]]:
    """Steps of one row for each body."""
    torch.manual_seed(0)
    hub = DeferringHub(Model())
    mediators = []
    for index, body in enumerate(bodies):
        mediator = Mediator(hub.tree, Turns(0, None), lambda mediator, body=body: {"found": body(mediator)})
        mediator.index = index
        hub.add(str(index), mediator, 8)
        mediators.append(mediator)
    outputs = []
    present = [str(index) for index in range(len(bodies))]
    ids = torch.arange(len(bodies))
    with torch.inference_mode():
        for step in range(steps):
            hub.begin(shares(present, range(len(bodies) + 1), [step] * len(bodies), [1] * len(bodies), len(bodies)))
            output: Any = hub.run(lambda: hub.calls._module("")(ids.clone()))
            hub.forward_done()
            outputs.append(output)
            hub.fire(LOOK, output.clone())
            hub.finish_step()
        for name in present:
            hub.end(name, None)
            hub.remove(name)
    hub.check_integrity()
    return hub, mediators, outputs


def breaks(mediator: Mediator) -> object:
    for _ in mediator.tracer.iter[1:]:
        args, _kwargs = mediator.read(IDS, "inputs")  # type: ignore[misc]
        args[0].fill_(100)
        mediator.read(LAST, "output")
    return None


def reads(*ports: Any) -> Body:
    def body(mediator: Mediator) -> object:
        return [mediator.read(port, "output") for _ in mediator.tracer.iter[:] for port in ports]

    return body


def test_the_block_ends_and_others_go_on() -> None:
    _, (bad, early, late, logits), outputs = run(breaks, reads(FIRST), reads(LAST), reads(LOOK))
    _, _, expected = run(reads(FIRST), reads(FIRST), reads(FIRST), reads(FIRST))
    assert all(map(torch.equal, outputs, expected))
    assert isinstance(bad.failure, WriteError)
    assert "failed on what this block had put in place of embed.input, in step 1: IndexError" in str(bad.failure)
    assert isinstance(bad.failure.__cause__, IndexError)
    assert isinstance(late.failure, PreemptedError), "it had not been served when the model failed"
    assert logits.failure is None
    seen: Any = logits.scope["found"]
    assert torch.equal(torch.cat(seen), torch.cat([one[3:] for one in expected]))
    assert isinstance(early.failure, PreemptedError)


def test_a_block_that_has_ended_is_told_too() -> None:
    def ends(mediator: Mediator) -> object:
        mediator.read(IDS, "inputs")[0][0].fill_(100)  # type: ignore[index]
        return None

    _, (bad,), _ = run(ends)
    assert isinstance(bad.failure, WriteError)


def test_what_no_block_has_done_is_the_engines() -> None:
    class Failing(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("of its own")

    hub = DeferringHub(Failing())
    with pytest.raises(RuntimeError, match="of its own"):
        hub.run(lambda: hub.calls._module("")(torch.zeros(1)))
