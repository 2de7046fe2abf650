"""When the requests of a trace are sent and their blocks collected; the engine is a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from vllm import RequestOutput, SamplingParams
from vllm.outputs import CompletionOutput

from invivo.envoy.errors import PreemptedError
from invivo.tracer.backend import Reply
from invivo.tracer.block import FORMAT, Block, Group, Payload
from invivo.tracer.failure import describe
from invivo.tracer.prompt import Prompt
from invivo.tracer.results import pack, unpack
from invivo.vllm_backend.engine import Engine
from invivo.vllm_backend.outbox import Outbox
from invivo.vllm_backend.settings import KEY
from invivo.vllm_backend.sync import Request, SyncBackend, _calls

BLOCK = Block("with t:\n    pass\n", "f.py", 1, 0, "<module>", "module", None, ())


class Llm:
    """As much of `vllm.LLM` as the backend uses: requests end in a given order, one with each step.

    Attributes:
        log: what was asked, in order; requests go by the number of their invoke.
        traces: for each block that was sent, its trace and the one of all invokes.
        preempted: how many of the next replies tell of a preemption.
    """

    def __init__(self, order: Sequence[int], reason: str = "length") -> None:
        self.traces: list[tuple[str, str]] = []
        self.names = {"group": "group"}
        self.preempted = 0
        self.log: list[str] = []
        self.llm_engine = self
        self.order = list(order)
        self.reason = reason
        self.running: dict[int, str] = {}
        self.count = 10

    def enqueue(self, prompts: list[Any], params: list[SamplingParams], use_tqdm: bool) -> list[str]:
        made = []
        for one in params:
            payload = msgspec.msgpack.decode((one.extra_args or {})[KEY], type=Payload)
            assert payload.group is not None
            self.traces.append((payload.trace, payload.group.trace))
            self.names[payload.trace] = str(payload.group.index)
            self.running[payload.group.index] = str(self.count)
            made.append(f"{self.count}-{'0' * 8}")
            self.count += 1
        self.log.append("send " + " ".join(map(str, list(self.running)[-len(params) :])))
        return made

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[RequestOutput]:
        ends = next((index for index in self.order if index in self.running), None)
        if ends is None:
            raise KeyboardInterrupt
        self.order.remove(ends)
        done = CompletionOutput(0, "", [1], None, None, finish_reason=self.reason)
        return [RequestOutput(self.running.pop(ends), "", [1], None, [done], True)]

    def abort_request(self, ids: list[str], internal: bool) -> None:
        self.log.append("abort " + " ".join(ids))
        self.running.clear()

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[bytes]:
        if method == "invivo_collect_all":
            return [msgspec.msgpack.encode([self.collective_rpc("invivo_collect", asked)[0] for asked in args[0]])]
        name = self.names[args[0]]
        self.log.append(f"{method.removeprefix('invivo_')} {name}")
        failure = describe(PreemptedError("memory ran out")) if self.preempted else None
        self.preempted = max(self.preempted - 1, 0)
        return [Outbox().send(args[0], Reply(pack({"trace": name}), failure, "", (), None))]


def payloads_of(*groups: tuple[dict[str, int], dict[str, int]]) -> list[Payload]:
    """Invokes that take these values and meet at these barriers."""
    return [
        Payload(
            FORMAT,
            str(index),
            BLOCK,
            b"",
            (),
            0,
            (),
            Group("group", index, len(groups), tuple(takes.items()), (), tuple(barriers.items())),
        )
        for index, (takes, barriers) in enumerate(groups)
    ]


def run(llm: Llm, *groups: tuple[dict[str, int], dict[str, int]]) -> list[tuple[Reply, object]]:
    """Run `payloads_of` these."""
    engine = Engine("a model", {})
    engine._llm = llm  # type: ignore[assignment]
    request = Request(Prompt([1], None), SamplingParams())
    try:
        return SyncBackend(engine).run_group(payloads_of(*groups), [request] * len(groups))
    finally:
        engine._llm = None


def test_all_run_together_and_come_in_order() -> None:
    llm = Llm([2, 0, 1])
    outcomes = run(llm, ({}, {}), ({}, {}), ({}, {}))
    assert llm.log == ["send 0 1 2", "collect 2", "collect 0", "collect 1"]
    assert [unpack(reply.saves) for reply, _ in outcomes] == [{"trace": "0"}, {"trace": "1"}, {"trace": "2"}]
    assert [output.request_id for _, output in outcomes] == ["10", "11", "12"]  # type: ignore[attr-defined]


def test_one_that_takes_a_value_is_sent_when_the_giver_is_over() -> None:
    llm = Llm([2, 0, 1, 3])
    run(llm, ({}, {}), ({"h": 0}, {}), ({}, {}), ({"g": 1}, {}))
    assert llm.log == ["send 0 2", "collect 2", "collect 0", "send 1", "collect 1", "send 3", "collect 3"]


def test_blocks_that_meet_are_collected_together() -> None:
    llm = Llm([0, 2, 1])
    run(llm, ({}, {"b": 2}), ({}, {"b": 2}), ({}, {}))
    assert llm.log == ["send 0 1 2", "collect 2", "collect 0", "collect 1"]


def test_one_call_collects_blocks_of_which_nobody_else_may_change_what_they_save() -> None:
    """The others are copied one after the other: the end of a block's body may change what the one before has saved."""
    own = Group("group", 0, 5, (), (), ())
    taking, giving = Group("group", 0, 5, (("h", 0),), (), ()), Group("group", 0, 5, (), ("h",), ())
    assert _calls([0, 1, 2, 3], [own] * 4) == [[0, 1, 2, 3]]
    assert _calls([0, 1, 2, 4], [own, own, giving, own, taking]) == [[0, 1], [2], [4]]
    assert _calls([0, 1, 2], [giving, own, own]) == [[0], [1, 2]]
    assert [*map(len, _calls(range(40), [own] * 40))] == [16, 16, 8]


def test_an_engine_that_cannot_start_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing in it that would have to be forgotten."""
    made: list[Engine] = []

    def make(engine: Engine) -> Any:
        made.append(engine)
        raise RuntimeError("no such device")

    monkeypatch.setattr(Engine, "_make", make)
    engine = Engine("a model", {})
    request = Request(Prompt([1], None), SamplingParams())
    (alone,) = payloads_of(({}, {}))
    with pytest.raises(RuntimeError, match="no such device") as one:
        SyncBackend(engine).run(alone, request)
    with pytest.raises(RuntimeError, match="no such device") as several:
        SyncBackend(engine).run_group([alone], [request])
    assert made == [engine, engine]
    assert one.value.__context__ is several.value.__context__ is None


def test_an_interrupted_wait_ends_all_of_them() -> None:
    llm = Llm([1])
    with pytest.raises(KeyboardInterrupt):
        run(llm, ({}, {}), ({}, {}))
    assert llm.log[:2] == ["send 0 1", "collect 1"]
    assert llm.log[2:] == ["abort 10-00000000 11-00000000", "discard_group group"]


@pytest.mark.parametrize(("preempted", "runs"), [(1, 2), (3, 3)])
def test_a_preempted_trace_is_run_again_as_a_whole_and_as_another_one(preempted: int, runs: int) -> None:
    llm = Llm([0, 1] * runs)
    llm.preempted = preempted
    outcomes = run(llm, ({}, {}), ({"h": 0}, {}))
    assert llm.log == ["send 0", "collect 0", "send 1", "collect 1"] * runs
    traces, groups = zip(*llm.traces, strict=True)
    assert len(set(traces)) == 2 * runs and len(set(groups)) == runs
    assert [reply.failure is not None for reply, _ in outcomes] == [False, False]


def test_an_error_of_the_engine_is_the_failure_of_the_invoke() -> None:
    outcomes = run(Llm([0, 1], reason="error"), ({}, {}), ({}, {}))
    assert all(reply.failure is not None for reply, _ in outcomes)
