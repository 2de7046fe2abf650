"""When the requests of a trace in an asynchronous engine are sent and their blocks ended; the engine is a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput

from invivo.envoy.errors import SamplingError
from invivo.tracer.block import Group
from invivo.tracer.prompt import Prompt
from invivo.vllm_backend.course import Course, Sending
from invivo.vllm_backend.in_band import Cargo
from invivo.vllm_backend.inbox import Collector
from invivo.vllm_backend.settings import KEY


class Llm:
    """As much of `TracingLLM` as a course uses.

    Attributes:
        log: what was asked, in order; requests go by their traces, which are numbers.
    """

    def __init__(self, refuses: int | None = None) -> None:
        self.log: list[str] = []
        self.collectors: dict[int, Collector] = {}
        self.refuses = refuses

    def least_busy(self) -> int:
        return 3

    async def begin(self, collector: Collector, prompt: Prompt, params: SamplingParams, engine: int) -> None:
        await asyncio.sleep(0)
        assert engine == 3, "all requests of a trace go to one engine"
        index = int(collector.request_id.partition("-")[0])
        if index == self.refuses:
            raise VLLMValidationError("no")
        self.collectors[index] = collector
        self.log.append(f"send {index}")

    async def abort(self, ids: list[str], internal: bool) -> None:
        self.log.append("abort " + " ".join(one.partition("-")[0] for one in ids))

    async def collective_rpc(self, method: str, timeout: object, args: tuple[Any, ...], *, engine: int) -> list[bytes]:
        await asyncio.sleep(0)
        assert engine == 3 or not self.collectors
        self.log.append(f"{method.removeprefix('invivo_')} {args[0]}")
        return [f"reply {args[0]}".encode()]

    def put(self, index: int, tokens: list[int], cargo: Cargo | None = None, *, finished: bool = False) -> None:
        """An output of a request."""
        done = CompletionOutput(0, "", tokens, None, None, finish_reason="length" if finished else None)
        output = RequestOutput(str(index), "", [1], None, [done], finished)
        output.ec_transfer_params = None if cargo is None else {KEY: list(cargo)}
        self.collectors[index].put(output)


def course_of(llm: Any, *groups: tuple[dict[str, int], dict[str, int]] | None) -> Course:
    """The course of requests that take these values and meet at these barriers, or are samples."""
    return Course(
        llm,
        [
            Sending(
                Prompt([1], None),
                SamplingParams(),
                str(index),
                group and Group("group", index, len(groups), tuple(group[0].items()), (), tuple(group[1].items())),
            )
            for index, group in enumerate(groups)
        ],
    )


async def taken(course: Course, count: int) -> list[tuple[int, bytes | None]]:
    arrived = [await course.inbox.take() for _ in range(count)]
    return [(one.request, one.reply) for one in arrived]


def ends(llm: Llm, course: Course, *order: int) -> list[tuple[int, bytes | None]]:
    """Let the requests end in this order; what arrives."""

    async def main() -> list[tuple[int, bytes | None]]:
        await course.send()
        found = []
        for index in order:
            llm.put(index, [1], finished=True)
            await asyncio.sleep(0.01)
            found += await taken(course, len(course.inbox._items))
        return found

    return asyncio.run(main())


def test_one_that_takes_a_value_is_sent_when_the_giver_is_over() -> None:
    llm = Llm()
    course = course_of(llm, ({}, {}), ({"h": 0}, {}), ({}, {}), ({"g": 1}, {}))
    found = ends(llm, course, 2, 0, 1, 3)
    log = ["send 0", "send 2", "collect 2", "collect 0", "send 1", "collect 1", "send 3", "collect 3"]
    assert llm.log == log
    assert found == [(index, f"reply {index}".encode()) for index in (2, 0, 1, 3)]
    assert course.inbox.over


def test_blocks_that_meet_are_ended_together() -> None:
    llm = Llm()
    ends(llm, course_of(llm, ({}, {"b": 2}), ({}, {"b": 2}), ({}, {})), 0, 2, 1)
    assert llm.log == ["send 0", "send 1", "send 2", "collect 2", "collect 0", "collect 1"]


def test_a_reply_that_came_along_is_not_fetched_and_what_follows_is_ignored() -> None:
    llm = Llm()
    course = course_of(llm, None)

    async def main() -> None:
        await course.send()
        growing = [1]
        llm.put(0, growing, Cargo([b"h"], None))
        growing.append(2)
        llm.put(0, growing, Cargo([], b"reply"), finished=True)
        llm.put(0, growing, finished=True)
        first, last = await course.inbox.take(), await course.inbox.take()
        assert first.output.outputs[0].token_ids == [1] and first.streamed == [b"h"]
        assert last.reply == b"reply" and llm.log == ["send 0"]

    asyncio.run(main())


def test_leaving_aborts_what_was_sent_and_sends_no_more() -> None:
    llm = Llm()
    course = course_of(llm, ({}, {}), ({}, {}), ({"h": 0}, {}))

    async def main() -> None:
        await asyncio.gather(course.send(), course.leave())
        llm.put(0, [1], finished=True)
        course.inbox.end()
        await course.send()

    asyncio.run(main())
    assert llm.log == ["send 0", "send 1", "abort 0 1", "discard_group group"]

    samples = course_of(single := Llm(), None, None)
    asyncio.run(samples.leave())
    assert single.log == ["abort ", "discard 0", "discard 1"]


def test_a_refused_request_is_the_end_of_all() -> None:
    llm = Llm(refuses=1)
    course = course_of(llm, ({}, {}), ({}, {}), ({}, {}))
    asyncio.run(course.send())
    assert llm.log == ["send 0", "abort 0 1", "discard_group group"]
    with pytest.raises(SamplingError, match="no"):
        asyncio.run(course.inbox.take())


def test_an_error_of_the_engine_is_the_end_of_all() -> None:
    llm = Llm()
    course = course_of(llm, ({}, {}), ({}, {}))

    async def main() -> None:
        await course.send()
        llm.collectors[1].put(KeyError("gone"))
        llm.put(0, [1], finished=True)
        with pytest.raises(KeyError, match="gone"):
            await course.inbox.take()

    asyncio.run(main())
    assert llm.log == ["send 0", "send 1"]
