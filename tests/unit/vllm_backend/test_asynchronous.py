"""When the run of a preempted asynchronous trace is made again; the engine is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.outputs import CompletionOutput

from invivo.envoy.errors import PreemptedError
from invivo.tracer.backend import Reply
from invivo.tracer.block import FORMAT, Block, Payload
from invivo.tracer.failure import describe, rebuild
from invivo.tracer.prompt import Prompt
from invivo.tracer.results import pack, unpack
from invivo.tracer.streaming import Ended
from invivo.vllm_backend.async_engine import AsyncEngine
from invivo.vllm_backend.asynchronous import AsyncBackend, Stream
from invivo.vllm_backend.course import Sending
from invivo.vllm_backend.inbox import Arrived
from invivo.vllm_backend.outbox import Outbox
from invivo.vllm_backend.sync import Request

BLOCK = Block("with t:\n    pass\n", "f.py", 1, 0, "<module>", "module", None, ())
PAYLOAD = Payload(FORMAT, "trace", BLOCK, b"", (), 0, ())


class Inbox:
    """Has all outputs of a run."""

    awaited = False

    def __init__(self, items: list[Arrived]) -> None:
        self.items = items

    async def take(self) -> Arrived:
        return self.items.pop(0)


class Course:
    """As much of a `Course` as the backend uses."""

    single = True

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox


class Home:
    """Takes what comes home of one request."""

    def __init__(self) -> None:
        self.saves: dict[str, Any] = {}
        self.error: BaseException | None = None

    def arrived(self, invoke: int, reply: Reply, result: object) -> dict[str, Any]:
        self.saves = unpack(reply.saves)
        self.error = rebuild(reply.failure) if reply.failure is not None else None
        return self.saves

    def ended(self) -> Ended:
        return Ended(self.saves, {}, self.error)


class Engine:
    """As much of an `AsyncEngine` as the backend uses.

    Args:
        runs: for each run, the number of its outputs and whether it is preempted after them.
    """

    def __init__(self, *runs: tuple[int, bool]) -> None:
        self.runs = list(runs)
        self.traces: list[str] = []

    def begin(self, requests: Sequence[Sending]) -> Course:
        (request,) = requests
        self.traces.append(request.trace)
        outputs, preempted = self.runs.pop(0)
        failure = describe(PreemptedError("memory ran out")) if preempted else None
        reply = Outbox().send(request.trace, Reply(pack({"run": len(self.traces)}), failure, "", (), None))
        replies = [*[None] * (outputs - 1), reply]
        return Course(
            Inbox([Arrived(0, _output(at, last is not None), [], last) for at, last in enumerate(replies, 1)])
        )

    def abandon(self, course: Course) -> None:
        raise AssertionError("every run of these tests comes to its end")

    def call(self, method: str, *args: object) -> None:
        raise AssertionError("small replies come as they are")


def _output(count: int, finished: bool) -> RequestOutput:
    done = CompletionOutput(0, "", [1] * count, None, None, finish_reason="length" if finished else None)
    return RequestOutput("0", "", [1], None, [done], finished)


def stream(engine: Engine) -> Stream:
    request = Request(Prompt([1], None), SamplingParams())
    return AsyncBackend(cast("AsyncEngine", engine)).submit(PAYLOAD, request, Home())


async def take(outputs: Stream) -> list[int]:
    return [len(output.outputs[0].token_ids) async for output in outputs]


@pytest.mark.parametrize("runs", [[(3, True), (1, True), (4, False)], [(2, False)]])
def test_who_waits_for_the_end_has_it_run_again(runs: Sequence[tuple[int, bool]]) -> None:
    engine = Engine(*runs)
    assert asyncio.run(stream(engine).collect()) == {"run": len(runs)}
    assert engine.traces[0] == "trace" and len(set(engine.traces)) == len(runs)


def test_a_loop_that_has_seen_an_output_ends() -> None:
    with pytest.raises(PreemptedError):
        asyncio.run(take(stream(Engine((2, True)))))


def test_three_runs_are_all() -> None:
    with pytest.raises(PreemptedError):
        asyncio.run(stream(Engine((1, True), (1, True), (1, True))).collect())
