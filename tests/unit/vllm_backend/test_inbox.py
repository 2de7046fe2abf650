"""Outputs go from the engine's loop to any other, each of them, in order, and end for good."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from invivo.vllm_backend.inbox import Arrived, Inbox, Left
from invivo.vllm_backend.loop_thread import LoopThread


def arrived(number: int, *, finished: bool = False, request: int = 0) -> Arrived:
    output: Any = SimpleNamespace(number=number, finished=finished)
    return Arrived(request, output, [], b"reply" if finished else None)


async def failing() -> None:
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
    inbox = Inbox(2)

    async def engine() -> None:
        for number in range(48):
            inbox.put(arrived(number))
            await asyncio.sleep(0.0002 * (number % 3))
        inbox.put(arrived(48, finished=True, request=1))
        assert not inbox.over
        inbox.put(arrived(49, finished=True))
        inbox.put(arrived(50))

    thread.submit(engine)
    first = asyncio.run(taken(inbox, 20))
    rest = asyncio.run(taken(inbox, 30))
    assert [one.output.number for one in (*first, *rest)] == [*range(50)]
    assert inbox.over


@pytest.mark.parametrize("waiting", [True, False])
def test_errors_reach_whoever_waits_or_comes(thread: LoopThread, waiting: bool) -> None:
    inbox = Inbox(2)

    def engine() -> None:
        time.sleep(0.1 if waiting else 0)
        inbox.put(ZeroDivisionError())
        inbox.put(KeyError("later"))

    thread.soon(engine)
    time.sleep(0 if waiting else 0.1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(taken(inbox, 1))


def test_the_end_from_outside() -> None:
    inbox, quiet = Inbox(1), Inbox(1)

    async def main() -> None:
        waiting = asyncio.ensure_future(inbox.take())
        threading.Timer(0.05, inbox.end, [KeyError("closed")]).start()
        with pytest.raises(KeyError, match="closed"):
            await waiting

    asyncio.run(main())
    quiet.end()
    quiet.put(arrived(1, finished=True))
    with pytest.raises(Left):
        asyncio.run(asyncio.wait_for(quiet.take(), 1))


def test_leaving_wakes_whoever_waits(thread: LoopThread) -> None:
    inbox = Inbox(1)

    async def main() -> None:
        waiting = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        assert inbox.awaited
        thread.soon(inbox.end)
        with pytest.raises(Left):
            await asyncio.wait_for(waiting, 5)
        assert not inbox.awaited

    asyncio.run(main())


def test_a_waiting_task_that_was_cancelled_loses_no_output(thread: LoopThread) -> None:
    inbox = Inbox(1)

    async def main() -> None:
        waiting = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        waiting.cancel()
        thread.soon(lambda: inbox.put(arrived(1)))
        assert (await inbox.take()).output.number == 1

    asyncio.run(main())


def test_a_loop_that_was_closed_while_somebody_waited(thread: LoopThread) -> None:
    inbox = Inbox(1)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(inbox.take())
    loop.call_soon(loop.stop)
    loop.run_forever()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.close()
    inbox.put(arrived(1))
    assert len(asyncio.run(taken(inbox, 1))) == 1


def test_the_loop_thread_ends_what_runs_there() -> None:
    thread = LoopThread("test")
    future = thread.submit(asyncio.sleep, 100)
    failed = thread.submit(failing)
    with pytest.raises(ZeroDivisionError):
        failed.result(5)
    thread.stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        future.result(5)
    with pytest.raises(RuntimeError):
        thread.submit(asyncio.sleep, 0)
