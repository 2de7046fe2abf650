"""Outputs go from the engine's loop to any other, each of them, in order, and end for good."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from invivo.vllm_backend.in_band import Cargo
from invivo.vllm_backend.inbox import Inbox
from invivo.vllm_backend.loop_thread import LoopThread
from invivo.vllm_backend.settings import KEY

NOTHING = Cargo([], None)


def output(tokens: list[int], cargo: Cargo = NOTHING, *, finished: bool = False) -> Any:
    completion = SimpleNamespace(token_ids=tokens)
    return SimpleNamespace(outputs=[completion], finished=finished, ec_transfer_params={KEY: list(cargo)})


async def collected(output: Any) -> bytes:
    await asyncio.sleep(0.01)
    return b"collected"


async def failing(output: Any) -> bytes:
    raise ZeroDivisionError


async def taken(inbox: Inbox, count: int) -> list[Any]:
    return [await inbox.take() for _ in range(count)]


@pytest.fixture
def thread() -> Any:
    thread = LoopThread("test")
    yield thread
    thread.stop()
    thread.stop()


def test_outputs_from_another_thread_in_order(thread: LoopThread) -> None:
    inbox = Inbox("a", collected)
    growing = [0]

    async def engine() -> None:
        for number in range(1, 50):
            inbox.put(output(growing, Cargo([bytes([number])], None)))
            growing.append(number)
            await asyncio.sleep(0.0002 * (number % 3))
        inbox.put(output(growing, finished=True))
        inbox.put(output(growing))

    thread.submit(engine)
    first = asyncio.run(taken(inbox, 20))
    rest = asyncio.run(taken(inbox, 30))
    arrived = [*first, *rest]
    assert [len(one.output.outputs[0].token_ids) for one in arrived] == [*range(1, 50), 50]
    assert [one.streamed for one in arrived[:-1]] == [[bytes([number])] for number in range(1, 50)]
    assert [one.reply for one in arrived] == [None] * 49 + [b"collected"]
    assert inbox.over


def test_a_reply_that_came_along_is_not_collected(thread: LoopThread) -> None:
    inbox = Inbox("a", failing)
    thread.soon(lambda: inbox.put(output([1], Cargo([], b"reply"), finished=True)))
    assert asyncio.run(taken(inbox, 1))[0].reply == b"reply"


@pytest.mark.parametrize("waiting", [True, False])
def test_errors_reach_whoever_waits_or_comes(thread: LoopThread, waiting: bool) -> None:
    inbox = Inbox("a", failing)

    def engine() -> None:
        time.sleep(0.1 if waiting else 0)
        inbox.put(output([1], finished=True))
        inbox.put(KeyError("later"))

    thread.soon(engine)
    time.sleep(0 if waiting else 0.1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(taken(inbox, 1))


def test_the_end_from_outside() -> None:
    inbox, quiet = Inbox("a", collected), Inbox("b", collected)

    async def main() -> None:
        waiting = asyncio.ensure_future(inbox.take())
        threading.Timer(0.05, inbox.end, [KeyError("closed")]).start()
        with pytest.raises(KeyError, match="closed"):
            await waiting

    asyncio.run(main())
    quiet.end()
    quiet.put(output([1], finished=True))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(quiet.take(), 0.05))


def test_a_waiting_task_that_was_cancelled_loses_no_output(thread: LoopThread) -> None:
    inbox = Inbox("a", collected)

    async def main() -> None:
        waiting = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        waiting.cancel()
        thread.soon(lambda: inbox.put(output([1])))
        assert (await inbox.take()).output.outputs[0].token_ids == [1]

    asyncio.run(main())


def test_a_loop_that_was_closed_while_somebody_waited(thread: LoopThread) -> None:
    inbox = Inbox("a", collected)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(inbox.take())
    loop.call_soon(loop.stop)
    loop.run_forever()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.close()
    inbox.put(output([1]))
    assert len(asyncio.run(taken(inbox, 1))) == 1


def test_the_loop_thread_ends_what_runs_there() -> None:
    thread = LoopThread("test")
    future = thread.submit(asyncio.sleep, 100)
    failed = thread.submit(failing, None)
    with pytest.raises(ZeroDivisionError):
        failed.result(5)
    thread.stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        future.result(5)
    with pytest.raises(RuntimeError):
        thread.submit(asyncio.sleep, 0)
