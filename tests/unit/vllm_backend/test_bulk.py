"""Large saves through shared memory: they come home as they were, whatever the ticket says, and nothing stays."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from invivo.envoy.errors import EngineDiedError, InternalError, SaveError
from invivo.tracer.backend import Reply
from invivo.tracer.buffers import DTYPES
from invivo.tracer.results import pack, unpack
from invivo.vllm_backend import outbox, pickup
from invivo.vllm_backend.outbox import Outbox
from invivo.vllm_backend.parcel import FILE_NAME, THRESHOLD, Parcel, Ticket
from invivo.vllm_backend.pickup import Elsewhere, opened, receive

BIG = THRESHOLD // 4 + 1
"""Elements of float32 that are over the threshold by themselves."""


@pytest.fixture
def worker() -> Iterator[Outbox]:
    """A worker's side; in the end nothing may be open, mapped or running."""
    pickup._warn_once.cache_clear()
    made = Outbox()
    yield made
    made.check_integrity()
    until(lambda: not files() and made._thread is None)
    gc.collect()
    assert not mapped()


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def files() -> list[str]:
    """File descriptors of this process that are files with saves."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [link for link in found if FILE_NAME in link]


def mapped() -> bool:
    """Whether this process has one mapped."""
    with open("/proc/self/maps") as maps:
        return FILE_NAME in maps.read()


def send(worker: Outbox, **saves: object) -> bytes:
    return worker.send("a trace", Reply(pack(saves), None, "printed", (), None))


def ticket_of(data: bytes) -> Ticket:
    ticket = msgspec.msgpack.decode(data, type=Parcel).ticket
    assert ticket is not None
    return ticket


def calls(worker: Outbox) -> Callable[..., Any]:
    """What calls the worker's methods; the answers pass through msgpack, as vLLM's do."""

    def call(method: str, *args: object) -> Any:
        answer = getattr(worker, method.removeprefix("invivo_"))(*args)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer))

    return call


def never(*_args: object) -> Any:
    raise AssertionError("the worker is not to be called")


def home(worker: Outbox, data: bytes, call: Callable[..., Any] = never) -> dict[str, Any]:
    reply = receive(data, "a trace", call)
    assert reply.printed == "printed"
    return unpack(reply.saves)


def test_saves_up_to_the_threshold_go_in_the_message(worker: Outbox) -> None:
    small = torch.ones(THRESHOLD - 100, dtype=torch.uint8)
    data = send(worker, x=small)
    assert len(data) > THRESHOLD - 100
    assert torch.equal(home(worker, data)["x"], small)
    assert len(send(worker, x=torch.ones(THRESHOLD, dtype=torch.uint8))) < 200
    worker.drop("a trace")


@pytest.mark.parametrize("way", ["mapped", "in slices"])
def test_values_of_every_kind_come_home(worker: Outbox, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "in slices":
        monkeypatch.setattr(pickup, "opened", elsewhere)
    base = torch.randn(300, 2000)
    raw = torch.arange(16 * 40_000, dtype=torch.int32).remainder(251).to(torch.uint8)
    tensors = {name: raw.view(getattr(torch, name)) for name in sorted(DTYPES) if hasattr(torch, name)}
    tensors |= {"bool": torch.arange(70_000) % 3 == 0, "zero": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    tensors |= {"base": base, "view": base[7:100], "columns": base[:, ::2], "turned": base.T}
    tensors |= {"conj": torch.randn(40_000, dtype=torch.complex64).conj(), "bf16": base.bfloat16()}
    plain = {"list": [1, "a", (None, 2.0)], "array": np.arange(50_000.0), "text": "x" * 100_000}
    back = home(worker, send(worker, again=base, **tensors, **plain), calls(worker))
    for name, tensor in tensors.items():
        found = back[name]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
        assert torch.equal(bits(found), bits(tensor)), name
        assert not found.is_inference()
        found.zero_()  # its own: the others are still compared after this
    assert back["again"] is back["base"]
    assert back["list"] == plain["list"] and back["text"] == plain["text"]
    assert np.array_equal(back["array"], np.arange(50_000.0))
    back["array"][0] = 1


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def elsewhere(_ticket: Ticket) -> Any:
    raise Elsewhere("as in a test")


def test_tensors_live_on_the_shared_memory_until_the_last_one_goes(worker: Outbox) -> None:
    saves = home(worker, send(worker, a=torch.ones(BIG), b=torch.ones(BIG), small=torch.ones(3)))
    until(lambda: not files())  # the worker's end is closed without a call, and the client has none
    assert mapped()
    small = saves.pop("small")
    part = saves.pop("b")[5:7]
    saves.clear()
    part += 1
    assert part.tolist() == [2, 2]
    assert mapped()
    del part
    assert not mapped()
    assert small.tolist() == [1, 1, 1]  # copied: it keeps nothing else


def test_many_results_at_a_time(worker: Outbox) -> None:
    results = []
    for number in range(30):
        data = worker.send(f"trace {number}", Reply(pack({"x": torch.full((BIG,), number)}), None, "", (), None))
        results.append(data)
    back: list[Any] = [unpack(receive(data, f"trace {at}", never).saves)["x"] for at, data in enumerate(results)]
    assert [int(x[-1]) for x in back] == list(range(30))
    until(lambda: not files())


class Gate:
    """Stands for `outbox._write`: the copy goes on when the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.slices = threading.Event(), 0
        self.write = outbox._write
        monkeypatch.setattr(outbox, "_write", self)

    def __call__(self, fd: int, data: memoryview, start: int) -> None:
        self.slices += 1
        self.open.wait(20)
        self.write(fd, data, start)


@pytest.mark.parametrize("way", ["mapped", "in slices"])
def test_the_client_waits_for_the_copy(worker: Outbox, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "in slices":
        monkeypatch.setattr(pickup, "opened", elsewhere)
    gate = Gate(monkeypatch)
    data = send(worker, x=torch.ones(BIG))
    found: list[Any] = []
    client = threading.Thread(target=lambda: found.append(home(worker, data, calls(worker))["x"]))
    client.start()
    time.sleep(0.2)
    assert not found
    gate.open.set()
    client.join(10)
    assert torch.equal(found.pop(), torch.ones(BIG))


def test_a_trace_that_is_given_up_ends_the_copy(worker: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    data = send(worker, x=torch.ones(20 * BIG))
    memory = opened(ticket_of(data))
    until(lambda: gate.slices)
    worker.drop("a trace")  # it does not wait for the copy
    assert worker.fetch("a trace", 0, 1) is None
    gate.open.set()
    until(lambda: worker._thread is None)
    assert gate.slices == 1
    with pytest.raises(EngineDiedError, match="while it copied the saved values"):
        pickup.is_done(ticket_of(data), memory)


@pytest.mark.parametrize("way", ["mapped", "in slices"])
def test_no_memory_for_the_copy(worker: Outbox, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "in slices":
        monkeypatch.setattr(pickup, "opened", elsewhere)

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(outbox, "_write", full)
    with pytest.raises(SaveError, match=r"\(1 MiB\) cannot come home: .* \(No space left on device\). Save less"):
        home(worker, send(worker, x=torch.ones(BIG)), calls(worker))
    worker.drop("a trace")


def test_no_file_for_the_copy(
    worker: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_args: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    data = send(worker, x=torch.ones(BIG))
    assert len(data) > THRESHOLD
    assert torch.equal(home(worker, data)["x"], torch.ones(BIG))
    assert "no shared memory" in caplog.text


def test_saves_that_nobody_fetches_are_dropped(worker: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_SECONDS", 0.2)
    data = send(worker, x=torch.ones(BIG))
    with pytest.raises(InternalError, match="the saves of 1 traces were not fetched"):
        worker.check_integrity()
    until(lambda: not files())
    with pytest.raises(SaveError, match="the saved values are gone"):
        receive(data, "a trace", calls(worker))


def test_slices_are_announced_once(worker: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        data = send(worker, x=torch.ones(BIG))
        parcel = msgspec.msgpack.decode(data, type=Parcel)
        other = structs.replace(parcel, ticket=structs.replace(ticket_of(data), pid=2**22 + 1, fd=1000 + number))
        found = home(worker, msgspec.msgpack.encode(other), calls(worker))["x"]
        assert torch.equal(found, torch.ones(BIG))
    assert caplog.text.count("in slices, which is slower") == 1
    assert "cannot be opened (No such file or directory)" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"token": b"x" * 16},
        {"token": b""},
        {"inode": 3},
        {"sizes": (100, 4 * BIG + 64)},
        {"sizes": (1, 2)},
        {"pid": 1},
        {"pid": -1},
        {"fd": -1},
        {"fd": 2**40},
    ],
    ids=str,
)
def test_another_file_is_not_taken_for_the_saves(worker: Outbox, changes: dict[str, Any]) -> None:
    ticket = ticket_of(send(worker, x=torch.ones(BIG)))
    with pytest.raises(Elsewhere):
        opened(structs.replace(ticket, **changes))
    opened(ticket)


def test_a_number_that_stands_for_another_file_by_now(worker: Outbox) -> None:
    ticket = ticket_of(send(worker, x=torch.ones(BIG)))
    worker.drop("a trace")
    until(lambda: not files())
    other = os.memfd_create(FILE_NAME)
    if other != ticket.fd:
        os.dup2(other, ticket.fd, inheritable=False)
    os.ftruncate(ticket.fd, ticket.places[-1])
    try:
        with pytest.raises(Elsewhere, match="is not the engine's file"):
            opened(ticket)
        same = structs.replace(ticket, inode=os.fstat(ticket.fd).st_ino)
        with pytest.raises(Elsewhere, match="is not the engine's file"):  # the token
            opened(same)
        os.pwrite(ticket.fd, ticket.token, 0)
        with pytest.raises(Elsewhere, match="may shrink"):
            opened(same)
    finally:
        for fd in {other, ticket.fd}:
            os.close(fd)


def test_a_pipe_is_not_opened(worker: Outbox) -> None:
    ticket = ticket_of(send(worker, x=torch.ones(BIG)))
    read, write = os.pipe()
    try:
        for fd in (read, write):
            with pytest.raises(Elsewhere, match="is not the engine's file"):
                opened(structs.replace(ticket, fd=fd))
    finally:
        os.close(read)
        os.close(write)
    worker.drop("a trace")


@pytest.mark.parametrize("sizes", [(), (-1, 5), (2**47, 2**47), (2**62,)], ids=str)
def test_sizes_that_no_worker_sends(sizes: tuple[int, ...]) -> None:
    parcel = Parcel(Reply(pack({}), None, "", (), None), Ticket(os.getpid(), 0, 0, b"x" * 16, sizes))
    with pytest.raises(InternalError, match="ticket for saves of the sizes"):
        receive(msgspec.msgpack.encode(parcel), "a trace", never)


@pytest.mark.parametrize("part", [b"", b"x" * 63, b"x" * 65, "x" * 64, [1] * 64])
def test_slices_that_no_worker_sends(part: Any) -> None:
    pickup._warn_once.cache_clear()
    parcel = Parcel(Reply(pack({}), None, "", (), None), Ticket(-1, 0, 0, b"x" * 16, (2**40,)))
    with pytest.raises(InternalError, match="where 64"):
        receive(msgspec.msgpack.encode(parcel), "a trace", lambda *_args: part)


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_arbitrary_parcels_fail_cleanly(data: bytes) -> None:
    with pytest.raises(InternalError):
        receive(data, "a trace", never)


WORKER = """
import sys, torch, time
from invivo.tracer.backend import Reply
from invivo.tracer.results import pack
from invivo.vllm_backend import outbox
write = outbox._write
outbox._write = lambda *args: (time.sleep(float(sys.argv[1])), write(*args))
data = outbox.Outbox().send("a trace", Reply(pack({"x": torch.ones(3 << 20)}), None, "printed", (), None))
print(data.hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["in the middle of the copy", "after it"])
def test_a_worker_that_is_killed(when: str) -> None:
    """Its file can be opened from another process, is whole or not at all, and goes with its last user."""
    command = [sys.executable, "-c", WORKER, "1" if when.startswith("in") else "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        data = bytes.fromhex(process.stdout.readline())
        if when == "after it":
            saves = home(Outbox(), data)
            process.kill()
            process.wait()
            assert torch.equal(saves.pop("x"), torch.ones(3 << 20))
        else:
            threading.Timer(0.5, process.kill).start()
            with pytest.raises(EngineDiedError, match="died while it copied"):
                home(Outbox(), data)
    gc.collect()
    assert not mapped()
    assert not files()
