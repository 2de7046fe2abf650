"""Several blocks that have their turns at one port."""

from __future__ import annotations

from typing import Any

import torch

from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from support.hub_batch import Batch, Body, split


def test_blocks_at_one_port_go_on_to_different_ones(batch: Batch) -> None:
    rows = torch.randn(6, 3)
    order: list[str] = []

    def body(*ports: str) -> Body:
        def run(envoy: Any, mediator: Mediator) -> dict[str, object]:
            seen = {}
            for port in ports:
                module, _, kind = port.partition(".")
                seen[port] = getattr(getattr(envoy, module), kind) if kind else getattr(envoy, port)
                order.append(f"{mediator.request} {port}")
            return {"seen": seen}

        return run

    both = body("first.output", "second.output")
    one, *_, last = [
        batch.add("a", both),
        batch.add("b", both),
        batch.add("c", body("first.output", "logits")),
        batch.add("d", both),
        batch.add("e", body("first.output")),
        batch.add("f", both),
    ]
    out, _ = batch.step(rows, split(1, 1, 1, 1, 1, 1))
    assert order == [
        *(f"{request} first.output" for request in "abcdef"),
        *(f"{request} second.output" for request in "abdf"),
        "c logits",
    ]
    seen: Any = one.scope["seen"], last.scope["seen"]
    assert torch.equal(seen[0]["second.output"], out[:1]) and torch.equal(seen[1]["second.output"], out[5:])


def test_what_one_block_sets_is_not_there_in_the_turns_of_the_next(batch: Batch) -> None:
    def sets(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.first.output.clone()
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float64)
        return look(envoy.second.output)

    def sees(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy.first.output.clone()
        return look(envoy.second.output)

    def look(_: object) -> dict[str, object]:
        return {"grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype()}

    with torch.no_grad():  # as in an engine
        before = batch.add("a", sees, Turns(0, None, ()))
        own = batch.add("b", sets)
        after = batch.add("c", sees, Turns(0, None, ()))
        batch.step(torch.randn(3, 3), split(1, 1, 1))
    assert own.scope == {"grad": True, "dtype": torch.float64}
    assert before.scope == after.scope == {"grad": False, "dtype": torch.float32}
