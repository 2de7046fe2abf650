"""Blocks of one trace on one flat batch: their order, what they hand on, and where they wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from invivo.envoy import active
from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import InternalError, InvokeError, PortPassedError
from invivo.interleaver.group import Groups, Member
from invivo.interleaver.hub import Hub
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.windows import Share, Window
from invivo.tracer.block import Group

Body = Callable[[Any, Mediator], dict[str, object]]


class Batch:
    """A model with a hub, and the blocks of one trace."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        self.hub = Hub(self.model)
        self.envoy: Any = RootEnvoy(self.hub.tree, "")
        self.groups = Groups()

    def add(self, *bodies: Body, gives: tuple[str, ...] = (), count: int = 2) -> list[Mediator]:
        """One block for each body, as requests ``"0"``, ``"1"``, ...; all refer to barrier b."""
        made = []
        for index, body in enumerate(bodies):
            group = Group("t", index, len(bodies), (), gives, (("b", count),))
            made.append(self.launch(group, body))
        return made

    def launch(self, group: Group, body: Body) -> Mediator:
        mediator = Mediator(self.hub.tree, Turns(0, None), lambda mediator: body(self.envoy, mediator))
        mediator.member, mediator.index = self.groups.join(group), group.index
        mediator.member.mediator = mediator
        self.hub.add(str(group.index), mediator, 10)
        return mediator

    def step(self, step: int, *requests: int) -> torch.Tensor:
        """An engine step of these requests, one row each, in this order."""
        count = len(requests)
        split = {
            str(request): Share(Window(at, 1, count), Window(at, 1, count), step) for at, request in enumerate(requests)
        }
        with torch.inference_mode():
            self.hub.begin(split)
            out: torch.Tensor = self.model(torch.ones(count, 2))
            self.hub.forward_done()
            self.hub.finish_step()
        return out

    def leave(self) -> None:
        """End all requests, and have their blocks leave the trace."""
        for request in list(self.hub.mediators):
            self.hub.end(request, "result")
            mediator = self.hub.remove(request)
            assert mediator is not None and mediator.member is not None
            mediator.member.leave()


@pytest.fixture
def batch() -> Iterator[Batch]:
    batch = Batch()
    yield batch
    batch.leave()
    batch.hub.check_integrity()
    assert len(batch.groups) == 0


def meet(count: int = 2) -> None:
    active.session("a barrier").meet("b", count)


def test_turns_at_a_port_are_in_invoke_order(batch: Batch) -> None:
    seen: list[str] = []

    def late(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy[0].output
        seen.append("0 first")
        envoy[2].output
        seen.append("0 third")
        return {}

    def early(envoy: Any, mediator: Mediator) -> dict[str, object]:
        seen.append("1 start")
        envoy[2].output
        seen.append("1 third")
        return {}

    batch.add(late, early)
    batch.step(0, 1, 0)
    assert seen == ["1 start", "0 first", "0 third", "1 third"]


def test_blocks_meet_within_one_forward(batch: Batch) -> None:
    """The one that let the others go on is at a port; they can still have that port, and those after it."""
    box: dict[str, torch.Tensor] = {}

    def gives(envoy: Any, mediator: Mediator) -> dict[str, object]:
        box["h"] = envoy[1].output.clone()
        meet()
        return {}

    def waits(envoy: Any, mediator: Mediator) -> dict[str, object]:
        meet()
        envoy[1].output[:] = box["h"] + 1
        return {"seen": envoy[2].input.clone()}

    for order in ([gives, waits], [waits, gives]):
        box.clear()
        blocks = batch.add(*order)
        batch.step(0, 0, 1)
        assert all(block.done and block.failure is None for block in blocks), [block.failure for block in blocks]
        (seen,) = [block.scope["seen"] for block in blocks if block.scope]
        assert torch.equal(seen, box["h"] + 1)  # type: ignore[arg-type]
        batch.leave()


def test_who_waits_is_held(batch: Batch) -> None:
    def first(envoy: Any, mediator: Mediator) -> dict[str, object]:
        meet()
        steps = [mediator.advance(step) for step in (0, 1)]
        return {"steps": steps, "late": envoy[1].output.clone()}

    def second(envoy: Any, mediator: Mediator) -> dict[str, object]:
        mediator.advance(1)
        meet()
        return {}

    one, two = batch.add(first, second)
    batch.step(0, 0, 1)
    assert batch.hub.held == {"0"}
    batch.step(1, 1)
    assert batch.hub.held == frozenset() and two.done and not one.done
    batch.step(1, 0)
    assert one.done and one.scope["steps"] == [True, True]


def test_a_port_of_a_step_that_was_over_at_the_barrier(batch: Batch) -> None:
    def first(envoy: Any, mediator: Mediator) -> dict[str, object]:
        meet()
        envoy[2].output
        return {}

    def second(envoy: Any, mediator: Mediator) -> dict[str, object]:
        envoy[0].output
        meet()
        return {}

    one, two = batch.add(first, second)
    batch.step(0, 0)
    batch.step(0, 1)
    assert isinstance(one.failure, PortPassedError) and "when the barrier let the block go on" in str(one.failure)
    assert two.failure is None and batch.hub.ended == {"0"}


def test_a_request_that_goes_on_while_its_block_waits(batch: Batch) -> None:
    one, _ = batch.add(lambda e, m: meet() or {}, lambda e, m: meet() or {})  # type: ignore[func-returns-value]
    batch.step(0, 0)
    batch.step(1, 0)
    assert isinstance(one.failure, InvokeError) and "went on to step 1" in str(one.failure)


def test_a_block_that_goes_on_from_its_error_waits_no_longer(batch: Batch) -> None:
    def stubborn(envoy: Any, mediator: Mediator) -> dict[str, object]:
        try:
            meet()
        except InvokeError:
            mediator.advance(2)
        meet()
        return {}

    one, two = batch.add(stubborn, lambda e, m: meet() or {})  # type: ignore[func-returns-value]
    batch.step(0, 0)
    batch.step(1, 0)
    assert one.done, "the engine did not hold it"
    batch.step(0, 1)
    assert isinstance(two.failure, InvokeError) and "At the barrier: invoke 1" in str(two.failure)


def test_barriers_that_cannot_fill(batch: Batch) -> None:
    one, two = batch.add(lambda e, m: meet() or {}, lambda e, m: {})  # type: ignore[func-returns-value]
    batch.step(0, 0, 1)
    assert isinstance(one.failure, InvokeError) and two.failure is None
    assert "At the barrier: invoke 0; ended before: invoke 1; the trace has 2 invokes." in str(one.failure)
    batch.leave()
    one, two = batch.add(lambda e, m: meet() or {}, lambda e, m: meet() or {})  # type: ignore[func-returns-value]
    batch.step(0, 0)
    batch.hub.end("0", "result")
    assert isinstance(one.failure, InvokeError) and "its request had ended" in str(one.failure)


def test_a_block_that_waits_for_the_end_of_its_request_comes_to_no_barrier(batch: Batch) -> None:
    def result(envoy: Any, mediator: Mediator) -> dict[str, object]:
        mediator.result()
        return {}

    def next_step(envoy: Any, mediator: Mediator) -> dict[str, object]:
        mediator.advance(1)
        return {}

    one, two = batch.add(result, lambda e, m: meet() or {})  # type: ignore[func-returns-value]
    batch.step(0, 0, 1)
    assert isinstance(two.failure, InvokeError) and "ended before: invoke 0" in str(two.failure)
    assert not one.done
    batch.leave()
    one, two = batch.add(next_step, lambda e, m: meet() or {})  # type: ignore[func-returns-value]
    batch.step(0, 0, 1)
    assert batch.hub.held == {"1"}
    batch.hub.left("0")
    assert isinstance(two.failure, InvokeError) and "ended before: invoke 0" in str(two.failure)
    assert not batch.hub.held


def test_all_wait_at_different_barriers(batch: Batch) -> None:
    def at(key: str) -> Body:
        return lambda e, m: active.session("").meet(key, 2) or {}  # type: ignore[func-returns-value]

    both = (("b", 2), ("c", 2))
    blocks = [batch.launch(Group("t", i, 2, (), (), both), at(key)) for i, key in enumerate("bc")]
    batch.step(0, 0, 1)
    assert all(isinstance(block.failure, InvokeError) for block in blocks)
    assert "all others wait too" in str(blocks[0].failure)


def test_meeting_again_and_again(batch: Batch) -> None:
    def often(envoy: Any, mediator: Mediator) -> dict[str, object]:
        for _ in range(2000):
            meet()
        return {}

    blocks = batch.add(often, often)
    batch.step(0, 0, 1)
    assert all(block.done and block.failure is None for block in blocks)


def test_values_handed_on(batch: Batch) -> None:
    groups = batch.groups
    takes = (("h", 0),)
    with pytest.raises(InvokeError, match="and it has not ended yet"):
        groups.join(Group("t", 1, 3, takes, (), ())).take(pytest.fail)
    value = torch.ones(2)
    groups.join(Group("t", 0, 3, (), ("h", "g"), ())).give({"h": value, "other": 1}, None)
    assert groups.join(Group("t", 1, 3, takes, (), ())).take(pytest.fail)["h"] is value
    with pytest.raises(InvokeError, match="invoke 2 reads `g`, which invoke 0 was to hand on, and that one ended with"):
        groups.join(Group("t", 2, 3, (("g", 0),), (), ())).take(pytest.fail)
    groups.drop("t")
    groups.join(Group("t", 0, 2, (), ("h",), ())).give({"h": 1}, ValueError("why"))
    with pytest.raises(InvokeError, match=r"that one failed \(ValueError: why\)"):
        groups.join(Group("t", 1, 2, takes, (), ())).take(pytest.fail)
    groups.drop("t")


def test_samples_take_copies_and_say_where_they_cannot() -> None:
    """Of several samples each has its own list; a generator is the same one for all, which is worth a warning."""
    groups, told = Groups(), list[str]()
    lines, numbers = [1], iter(range(3))
    groups.join(Group("t", 0, 2, (), ("lines", "numbers"), ())).give({"lines": lines, "numbers": numbers}, None)
    sample = groups.join(Group("t", 1, 2, (("lines", 0), ("numbers", 0)), (), (), sampled=True))
    taken = sample.take(told.append)
    assert taken["lines"] == lines and taken["lines"] is not lines and not told
    generator = (number for number in lines)
    groups.drop("t")
    groups.join(Group("t", 0, 2, (), ("g",), ())).give({"g": generator}, None)
    sample = groups.join(Group("t", 1, 2, (("g", 0),), (), (), sampled=True))
    assert sample.take(told.append)["g"] is generator
    assert len(told) == 1 and "`g`, which invoke 0 hands on, cannot be copied (TypeError" in told[0]
    groups.drop("t")


def test_a_block_that_is_dropped_gives_nothing(batch: Batch) -> None:
    (one,) = batch.add(lambda e, m: e[0].output, gives=("h",))
    one.drop(InternalError("gone"))
    assert isinstance(one.member, Member)
    with pytest.raises(InvokeError, match="InternalError: gone"):
        batch.groups.join(Group("t", 1, 1, (("h", 0),), (), ())).take(pytest.fail)
