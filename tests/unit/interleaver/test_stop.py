"""A block that catches what `tracer.stop()` raises, and goes on, ends all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from invivo.envoy.envoy import RootEnvoy
from invivo.interleaver.hub import Hub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import shares
from invivo.tracer.barrier import Barrier

NETWORK = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
HUB = Hub(NETWORK)
MODEL: Any = RootEnvoy(HUB.tree, "")


def write() -> None:
    MODEL[0].output = torch.ones(2, 3)


GOES_ON: dict[str, Callable[[Any], object]] = {
    "a later port": lambda tracer: MODEL[1].output,
    "the same port": lambda tracer: MODEL[0].output,
    "writing": lambda tracer: write(),
    "the next step": lambda tracer: list(tracer.iter[:]),
    "the end": lambda tracer: tracer.result,
    "a call": lambda tracer: MODEL[0](torch.ones(3)),
    "a barrier": lambda tracer: Barrier("0", 2)(),
    "another stop": lambda tracer: tracer.stop(),
}


class Caught:
    """Leaves no exception."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> bool:
        return True


def run(body: Callable[[Any], Iterator[object]]) -> tuple[Mediator, list[object]]:
    seen: list[object] = []

    def block(mediator: Mediator) -> dict[str, object]:
        seen.extend(["begun", MODEL[0].output])
        seen.extend(body(mediator.tracer))
        return {"seen": seen}

    mediator = Mediator(HUB.tree, Turns(0, None), block)
    HUB.add("a", mediator, 10)
    with torch.inference_mode():
        HUB.begin(shares(["a"], [0, 2], [0], [2], 2))
        NETWORK(torch.zeros(2, 3))
        HUB.forward_done()
        HUB.finish_step()
    HUB.end("a", "result")
    HUB.remove("a")
    HUB.check_integrity()
    return mediator, seen[2:]


@pytest.mark.parametrize("how", ["except", "suppress", "exit"])
@pytest.mark.parametrize("what", GOES_ON)
def test_a_caught_stop_is_raised_again(what: str, how: str) -> None:
    def body(tracer: Any) -> Iterator[object]:
        if how == "except":
            try:
                tracer.stop()
            except BaseException:
                yield "caught"
        else:
            with contextlib.suppress(BaseException) if how == "suppress" else Caught():
                tracer.stop()
            yield "caught"
        yield GOES_ON[what](tracer)

    mediator, seen = run(body)
    assert seen == ["caught"]
    assert mediator.done and mediator.stopped and mediator.failure is None


def test_a_block_that_asks_for_nothing_more_runs_to_its_end() -> None:
    def body(tracer: Any) -> Iterator[object]:
        with contextlib.suppress(BaseException):
            tracer.stop()
        yield "caught"

    mediator, seen = run(body)
    assert seen == ["caught"] and "seen" in mediator.scope
    assert mediator.done and mediator.stopped and mediator.failure is None
