"""Two ranks of a toy model, as two processes, with the exchanges of a real engine: what they read, write and agree on.

Each test is a function that both ranks run; what both find is compared here.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from invivo.envoy.address import OUTPUT, Port, port_at
from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import InternalError, RanksError, UnsupportedError
from invivo.interleaver.group import Groups
from invivo.interleaver.layout import SUMMED, WHOLE, Layout, Piece
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.modes import Turns
from invivo.interleaver.parallel_hub import ParallelHub
from invivo.interleaver.ranks import GroupRanks
from invivo.interleaver.shards import Shards
from invivo.interleaver.windows import shares
from invivo.tracer.block import Group
from support.two_ranks import serve

RANKS = 2
ROWS = 5
ME = "unit.interleaver.test_parallel_hub"
"""This module, to processes that pytest does not import it for."""


class Half(torch.nn.Module):
    """One rank's half of two layers; the second one's output is a sum over the ranks."""

    def __init__(self, ranks: GroupRanks) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = torch.nn.Linear(4, 6, bias=False)
        self.middle = torch.nn.Identity()
        self.down = torch.nn.Linear(6, 4, bias=False)
        self.whole = torch.nn.Identity()
        for layer, dim in ((self.up, 0), (self.down, 1)):
            weight = torch.randn(12 if dim == 0 else 4, 12 if dim == 1 else 4, generator=generator)
            layer.weight.data = weight.chunk(RANKS, dim)[ranks.rank].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.down(self.middle(torch.relu(self.up(x))))
        parts = [torch.empty_like(partial) for _ in range(RANKS)]
        torch.distributed.all_gather(parts, partial)
        result: torch.Tensor = self.whole(SUMMED.join(parts))
        return result


class Known:
    """What is known of the toy's layers: nothing of `middle`."""

    def name(self, port: Port) -> str:
        return "Identity"

    def of(self, port: Port, number: int, tensor: torch.Tensor, *, whole: bool = False) -> Layout:
        if port == port_at("down", OUTPUT):
            return SUMMED
        return Layout(pieces=(Piece(6),)) if port == port_at("up", OUTPUT) else WHOLE


class Rank:
    """What a test's function is given on each rank."""

    def __init__(self, ranks: GroupRanks) -> None:
        self.ranks = ranks
        self.hub = ParallelHub(Half(ranks), Shards(ranks, Known()))
        self.envoy: Any = RootEnvoy(self.hub.tree, "")
        self.rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))

    def add(self, request: str, body: Callable[[Any], dict[str, object]]) -> Mediator:
        mediator = Mediator(self.hub.tree, Turns(0, None), lambda _: body(self.envoy))
        self.hub.add(request, mediator, 10)
        return mediator

    def step(self) -> torch.Tensor:
        """Three rows of request a, two of request b."""
        with torch.inference_mode():
            self.hub.begin(shares("ab", [0, 3, 5], [0, 0], [3, 2], ROWS))
            out: torch.Tensor = self.model(self.rows)
            self.hub.forward_done()
            self.hub.finish_step()
        for request in list(self.hub.mediators):
            self.hub.end(request, None)
            self.hub.remove(request)
        self.hub.check_integrity()
        return out.clone()

    @property
    def model(self) -> Any:
        return self.hub._hooks.module("")


@pytest.fixture(scope="module")
def both() -> Iterator[Callable[[str], list[Any]]]:
    """Runs a function of this module, by name, on both ranks, and gives what each returned."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    tasks = [context.Queue() for _ in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"
        processes = [
            context.Process(
                target=serve, args=(ME, RANKS, rank, f"{folder}/rendezvous", tasks[rank], answers), daemon=True
            )
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()

        def run(name: str) -> list[Any]:
            for queue in tasks:
                queue.put(name)
            found = dict(answers.get(timeout=60) for _ in range(RANKS))
            return [found[rank] for rank in range(RANKS)]

        yield run
        for queue in tasks:
            queue.put(None)
        for process in processes:
            process.join(20)


def values(rank: Rank) -> Any:
    seen: dict[str, torch.Tensor] = {}

    def read(envoy: Any) -> dict[str, object]:
        seen["up"] = envoy.up.output
        seen["down"] = envoy.down.output
        seen["out"] = envoy.whole.output
        return {}

    rank.add("b", read)
    out = rank.step()
    sent = {str(port): count for port, count in rank.ranks.sent.items() if port is not None}
    return seen, out, sent


def test_reads_are_whole_and_only_their_rows_travel(both: Callable[[str], list[Any]]) -> None:
    (seen, out, sent), other = both("values")
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(12, 4, generator=generator), torch.randn(4, 12, generator=generator)
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    expected = torch.relu(rows @ up.T) @ down.T
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(seen["up"], (rows @ up.T)[3:], atol=1e-5)
    assert torch.allclose(seen["down"], expected[3:], atol=1e-5) and torch.equal(seen["out"], out[3:])
    assert all(torch.equal(seen[name], other[0][name]) for name in seen)
    assert sent["up.output"] == 2 * 6 * 4 and sent["down.output"] == 2 * 4 * 4 and "whole.output" not in sent


def edits(rank: Rank) -> Any:
    def edit(envoy: Any) -> dict[str, object]:
        envoy.up.output[:, 5:7] = 3  # the last column of one rank, the first of the other
        envoy.down.output[0] = 7
        return {}

    rank.add("a", edit)
    return rank.step()


def test_writes_reach_all_ranks(both: Callable[[str], list[Any]]) -> None:
    out, other = both("edits")
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(12, 4, generator=generator), torch.randn(4, 12, generator=generator)
    middle = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)) @ up.T
    middle[:3, 5:7] = 3
    expected = torch.relu(middle) @ down.T
    expected[0] = 7
    assert torch.allclose(out, expected, atol=1e-5) and torch.equal(out, other)


def unknown(rank: Rank) -> Any:
    def read(envoy: Any) -> dict[str, object]:
        envoy.middle.output
        return {}

    mediator = rank.add("a", read)
    rank.step()
    return type(mediator.failure), str(mediator.failure)


def test_a_split_module_that_is_not_known_is_an_error(both: Callable[[str], list[Any]]) -> None:
    for kind, text in both("unknown"):
        assert kind is UnsupportedError
        assert "middle.output holds something else on each of the 2 ranks" in text and "class Identity" in text


def one_rank_differs(rank: Rank) -> Any:
    kinds: list[Any] = []
    for odd in range(RANKS):
        for what in ("port", "error", "write", "end"):

            def block(envoy: Any, odd: int = odd, what: str = what) -> dict[str, object]:
                value = envoy.up.output
                if rank.ranks.rank == odd and what == "error":
                    raise KeyError(what)
                if rank.ranks.rank == odd and what == "end":
                    return {}
                if rank.ranks.rank == odd and what == "port":
                    envoy.down.input
                if what == "write":
                    value += rank.ranks.rank
                envoy.down.output
                return {}

            def other(envoy: Any) -> dict[str, object]:
                envoy.up.output[:] += 1
                return {"seen": envoy.down.output.clone()}

            wrong, right = rank.add("a", block), rank.add("b", other)
            rank.step()
            kinds.append((type(wrong.failure), right.failure, right.scope["seen"]))
    return kinds


def test_a_block_that_differs_ends_and_nobody_waits(both: Callable[[str], list[Any]]) -> None:
    found, other = both("one_rank_differs")
    for number, ((kind, failure, seen), (also, _, same)) in enumerate(zip(found, other, strict=True)):
        assert kind is also is (KeyError if number % 4 == 1 else RanksError), (number, kind, also)
        assert failure is None and torch.equal(seen, same)


def a_hub_fails(rank: Rank) -> Any:
    def read(envoy: Any) -> dict[str, object]:
        envoy.up.output
        envoy.down.output
        return {}

    mediators = [rank.add(request, read) for request in "ab"]
    if rank.ranks.rank == 1:
        rank.hub.give_up(MemoryError("on one rank"))
    rank.step()
    again = rank.add("a", read)
    rank.step()
    return [type(mediator.failure) for mediator in (*mediators, again)]


def test_when_the_hub_of_one_rank_fails_that_of_the_others_does(both: Callable[[str], list[Any]]) -> None:
    assert both("a_hub_fails") == [[InternalError, InternalError, type(None)]] * 2


def a_hub_fails_at_a_port(rank: Rank) -> Any:
    """On one rank, before its rows have travelled, after that, or where it has none to call a module with."""
    import invivo.interleaver.parallel_hub as module

    def no_memory(*_: object, **__: object) -> Any:
        raise MemoryError("on one rank")

    def read(envoy: Any) -> dict[str, object]:
        envoy.up.output
        envoy.down.output
        return {}

    def call(envoy: Any) -> dict[str, object]:
        envoy.up(envoy.up.input)
        envoy.down.output
        return {}

    failing: list[tuple[Any, str, Any]] = [
        (GroupRanks, "make_room", read),
        (module, "copies", read),
        (Layout, "join", read),
        (Shards, "part", call),
    ]
    found = []
    for odd in range(RANKS):
        for owner, name, block in failing:
            with pytest.MonkeyPatch.context() as patch:
                if rank.ranks.rank == odd:
                    patch.setattr(owner, name, no_memory)
                if name == "join":
                    rank.model.forward = lambda rows: rank.model.whole(rank.model.up(rows))
                mediator = rank.add("a", block)
                rank.step()
            rank.model.__dict__.pop("forward", None)
            again = rank.add("a", read)
            rank.step()
            found.append((type(mediator.failure), str(mediator.failure), type(again.failure)))
    return found


def test_a_rank_that_fails_at_a_port_keeps_nobody_waiting(both: Callable[[str], list[Any]]) -> None:
    for number, found in enumerate(zip(*both("a_hub_fails_at_a_port"), strict=True)):
        for kind, text, again in found:
            assert kind is (RanksError if number % 4 == 3 else InternalError) and again is type(None)
            assert "MemoryError" in text


def shared_calls(rank: Rank) -> Any:
    order: list[str] = []

    def call(name: str) -> Callable[[Any], dict[str, object]]:
        def body(envoy: Any) -> dict[str, object]:
            value = envoy.whole.input
            order.append(f"{name} reads")
            envoy.whole(value)
            order.append(f"{name} has called")
            return {}

        return body

    groups = Groups()
    for at, name in enumerate("ab"):
        mediator = rank.add(name, call(name))
        member = groups.join(Group("trace", at, 2, (), (), (("meet", 2),)))
        mediator.member, mediator.index, member.mediator = member, at, mediator
    rank.step()
    return order


def test_blocks_that_share_something_have_whole_turns_also_where_they_call_modules(
    both: Callable[[str], list[Any]],
) -> None:
    assert both("shared_calls") == [["a reads", "a has called", "b reads", "b has called"]] * RANKS
