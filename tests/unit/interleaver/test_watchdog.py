"""A block that goes over a limit is ended wherever it is, and what runs around it never sees the exception."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import pytest
import torch

from invivo import InternalError, LimitError, Local, MemoryLimitError, TimeLimitError
from invivo.envoy.envoy import RootEnvoy
from invivo.interleaver import watchdog
from invivo.interleaver.async_error import SIGNAL, raise_in, take_back
from invivo.interleaver.guard import Guard, OverLimit
from invivo.interleaver.hub import Hub
from invivo.interleaver.limits import Limits
from invivo.interleaver.mediator import Mediator
from invivo.interleaver.memory import Memory
from invivo.interleaver.modes import Turns
from invivo.interleaver.watchdog import WATCHDOG
from invivo.interleaver.windows import shares


def spin() -> None:
    """Go on without end, in Python."""
    while True:
        len(())


@pytest.fixture(params=["main thread", "other thread"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], None]], None]:
    """Runs a function in the main thread, where signals come, or in another one, where they do not."""

    def in_other(function: Callable[[], None]) -> None:
        raised: list[BaseException] = []

        def caught() -> None:
            try:
                function()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=caught)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    return in_other if request.param == "other thread" else lambda function: function()


@pytest.fixture(autouse=True)
def _nothing_watched() -> Iterator[None]:
    yield
    assert not WATCHDOG._guards


def guarded(body: Callable[[], object], time_limit: float = 0.1) -> Guard:
    """Runs a function as a block of one turn; its guard afterwards."""
    guard = Guard(Limits(time=time_limit))
    block = greenlet.greenlet(lambda _: body())
    guard.turn(block, None, None)
    guard.leave()
    assert block.dead
    return guard


def test_a_block_without_end_is_ended(run: Any) -> None:
    def check() -> None:
        began = time.monotonic()
        guard = guarded(spin)
        assert isinstance(guard.error, TimeLimitError)
        assert time.monotonic() - began < 2

    run(check)


@pytest.mark.parametrize("kind", [Exception, BaseException])
@pytest.mark.parametrize("work", [spin, lambda: time.sleep(0.02)])
def test_one_that_catches_it_and_goes_on_is_ended_too(run: Any, kind: type[BaseException], work: Any) -> None:
    caught = []

    def body() -> None:
        while True:
            try:
                while True:
                    work()
            except kind as error:
                caught.append(error)

    def check() -> None:
        began = time.monotonic()
        assert isinstance(guarded(body).error, TimeLimitError)
        assert time.monotonic() - began < 5

    run(check)
    assert not caught or kind is BaseException


@pytest.mark.parametrize("wait", [lambda: time.sleep(60), threading.Event().wait, lambda: input_of_pipe()])
def test_the_main_thread_is_woken(wait: Any) -> None:
    began = time.monotonic()
    assert isinstance(guarded(wait).error, TimeLimitError)
    assert time.monotonic() - began < 2


def input_of_pipe() -> None:
    import os

    read, write = os.pipe()
    try:
        os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    before = signal.getsignal(SIGNAL)
    signal.signal(SIGNAL, signal.SIG_IGN)
    try:
        assert isinstance(guarded(spin).error, TimeLimitError)
        assert signal.getsignal(SIGNAL) is signal.SIG_IGN
    finally:
        signal.signal(SIGNAL, before)


def test_a_block_within_its_limits_is_left_alone(run: Any) -> None:
    def check() -> None:
        guard = guarded(lambda: time.sleep(0.2), time_limit=5)
        assert guard.error is None
        assert guard.number == 2

    run(check)


def test_the_exception_is_made_for_a_block_that_needs_it_and_is_one() -> None:
    guard = guarded(lambda: None)
    assert "kind" not in vars(guard)
    found: list[type[OverLimit]] = []
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        found.append(guard.kind)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and set(found) == {guard.kind} and guard.kind.guard is guard


def test_the_exception_stays_in_the_block(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that end at about the moment when their time is over, 500 times and more: nothing may come after a turn."""
    monkeypatch.setattr(watchdog, "PERIOD", 0.0005)
    interval = sys.getswitchinterval()

    def check() -> None:
        ended = 0
        for number in range(5000):  # on a machine that does other things, the watching thread may hardly come to look
            if number >= 500 and 0 < ended < number:
                break
            length = 0.0005 + (number * 37 % 100) * 1e-5

            def body(length: float = length, sleeps: bool = number % 3 == 0) -> None:
                if sleeps:
                    time.sleep(length)
                end = time.perf_counter() + length
                while time.perf_counter() < end:
                    len(())

            guard = Guard(Limits(time=0.0008))
            block = greenlet.greenlet(lambda _, body=body: body())
            guard.turn(block, None, None)
            for _ in range(50):  # where the exception would come if it were left
                len([])
            guard.leave()
            ended += guard.error is not None
        assert 0 < ended < number

    sys.setswitchinterval(1e-5)
    try:
        run(check)
    finally:
        sys.setswitchinterval(interval)


def test_an_exception_that_comes_just_behind_the_switch_ends_the_block() -> None:
    """The block hands over at the moment when it is stopped: it is ended where it handed over."""
    guard = Guard(Limits(time=60))
    seen = []

    def body(_: object) -> None:
        parent = greenlet.getcurrent().parent
        assert parent is not None
        guard.error = TimeLimitError("just now")
        try:
            parent.switch("a port")
        except OverLimit as error:
            seen.append(error)
            raise

    block = greenlet.greenlet(body)
    assert guard.turn(block, None, None) is None
    guard.leave()
    assert block.dead
    assert seen[0].guard is guard


def test_one_that_was_stopped_too_late_goes_on() -> None:
    guard = Guard(Limits(time=60))
    block = greenlet.greenlet(lambda _: greenlet.getcurrent().parent.switch("a port"))  # type: ignore[union-attr]
    assert guard.turn(block, None, None) == "a port"
    guard.stop(1, TimeLimitError("of the turn before"))
    assert guard.error is None
    assert guard.turn(block, "on", None) == "on"
    guard.leave()


@pytest.mark.parametrize("inner_limits", [None, Limits(time=60)])
def test_a_block_inside_of_a_block_that_is_over_its_limit(run: Any, inner_limits: Limits | None) -> None:
    """The exception of the outer one passes through the inner one, and is not taken for the inner one's."""
    failures = []

    def body() -> None:
        inner = Mediator(
            RootEnvoy(Local(torch.nn.Identity())._tree, "")._tree, Turns(0, None), lambda _: spin(), inner_limits
        )  # type: ignore[arg-type, func-returns-value]
        try:
            inner.go_on()
        finally:
            failures.append(inner.failure)
            inner.drop(InternalError("the test is over"))

    run(lambda: failures.append(guarded(body).error))
    assert failures[0] is None
    assert isinstance(failures[1], TimeLimitError)


def test_several_blocks_with_limits_of_their_own(run: Any) -> None:
    """Each turn has all of the time, however many there are and however long all of them take together."""

    def check() -> None:
        guards = [Guard(Limits(time=0.3)) for _ in range(4)]

        def body(_: object) -> None:
            for _turn in range(3):
                time.sleep(0.1)
                greenlet.getcurrent().parent.switch("on")  # type: ignore[union-attr]

        blocks = [greenlet.greenlet(body) for _ in guards]
        for _turn in range(3):
            for guard, block in zip(guards, blocks, strict=True):
                assert guard.turn(block, None, None) == "on"
        last = greenlet.greenlet(lambda _: spin())
        late = Guard(Limits(time=0.1))
        assert late.turn(last, None, None) is None
        for guard in [*guards, late]:
            guard.leave()
        assert [guard.error for guard in guards] == [None] * 4
        assert isinstance(late.error, TimeLimitError)

    run(check)


def test_memory_is_stopped_and_given_back() -> None:
    model: Any = Local(torch.nn.Sequential(torch.nn.Identity()), memory_limit=200 << 20)
    memory = Memory()
    before = memory.resident()
    with pytest.raises(MemoryLimitError, match=r"added [\d.]+ [MG]iB .* limit is 200.0 MiB") as caught:
        with model.trace(torch.zeros(1)):
            kept = model[0].output.save()
            xs = []
            while True:
                xs.append(torch.ones(10**6))
    assert list(caught.value.saves) == ["kept"]  # type: ignore[attr-defined]
    assert memory.resident() - before < 50 << 20


def test_the_thread_sleeps_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PERIOD", 0.001)
    guarded(lambda: None)
    deadline = time.monotonic() + 5
    while not WATCHDOG.asleep and time.monotonic() < deadline:
        time.sleep(0.01)
    assert WATCHDOG.asleep
    assert isinstance(guarded(spin).error, LimitError)  # and wakes
    assert sum(thread.name == "invivo watchdog" for thread in threading.enumerate()) == 1


def test_in_a_batch_only_the_block_that_is_over_its_limit_ends(run: Any) -> None:
    def check() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        hub, rows, seen = Hub(model), torch.randn(3, 3), list[torch.Tensor]()
        envoy: Any = RootEnvoy(hub.tree, "")

        def stuck(_: Mediator) -> dict[str, object]:
            envoy[0].output[:] = 0
            envoy[1].input
            while True:
                try:
                    spin()
                except BaseException:
                    envoy[1].output  # over its limit, it gets no other port

        def fine(_: Mediator) -> dict[str, object]:
            envoy[0].output
            seen.append(envoy[1].output)
            return {}

        blocks = [("first", fine), ("stuck", stuck), ("last", fine)]
        for number, (request, body) in enumerate(blocks):
            hub.add(request, Mediator(hub.tree, Turns(number, None), body, Limits(time=0.1)), None)
        with torch.inference_mode():
            hub.begin(shares([request for request, _ in blocks], [0, 1, 2, 3], [0, 0, 0], [1, 1, 1], 3))
            out = model(rows)
            hub.forward_done()
            hub.finish_step()
        assert hub.ended == {"stuck"}
        assert isinstance(hub.mediators["stuck"].failure, TimeLimitError)
        with torch.no_grad():
            expected = model(rows)
        assert torch.allclose(out[[0, 2]], expected[[0, 2]])
        assert torch.equal(torch.cat(seen), out[[0, 2]])
        for request, _ in blocks:
            hub.end(request, None)
            hub.remove(request)
        hub.check_integrity()

    run(check)


@pytest.mark.timeout(30)
def test_what_was_taken_back_leaves_nothing_in_the_interpreter() -> None:
    """A flag of the interpreter that stayed up would keep it from ever entering a function under a trace function."""
    raised = []

    def run() -> None:
        try:
            raise_in(threading.get_ident(), KeyError)
            take_back()
        except KeyError:  # it was quicker
            return
        sys.settrace(lambda frame, event, arg: raised.append(event))
        try:
            len(str(threading.current_thread()))
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
