"""Files that a device copies to: what is in them, when they are used again, and when not.

The device is the CPU itself here, with a copier that does what it is told when it is waited for, or asked.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from invivo.envoy.errors import SaveError
from invivo.tracer import buffers
from invivo.tracer.backend import Reply
from invivo.tracer.results import Unsent, pack, unpack
from invivo.vllm_backend import lent_files, outbox, pickup
from invivo.vllm_backend.lent_files import PART, Copy, File
from invivo.vllm_backend.outbox import Outbox
from invivo.vllm_backend.parcel import Parcel
from invivo.vllm_backend.pickup import receive

BIG = 3 << 20
"""Bytes that are over the threshold by themselves."""


class Late:
    """See `lent_files.Copier`."""

    def __init__(self) -> None:
        self.locked: list[int] = []
        self.copies: list[Copy] = []
        self.fails = ""
        self.begun = 0
        self.busy: set[int] = set()
        """Numbers of copies that take long."""

    def lock(self, memory: torch.Tensor) -> None:
        if self.fails == "lock":
            raise RuntimeError("out of memory")
        self.locked.append(memory.data_ptr())

    def unlock(self, memory: torch.Tensor) -> None:
        self.locked.remove(memory.data_ptr())

    def mark(self) -> Late:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """All is there."""

    def start(self, copies: Sequence[Copy], after: Late) -> _Copying:
        assert after is self
        self.copies = [*copies]
        self.begun += 1
        return _Copying(self, self.begun - 1)


class _Copying:
    """See `lent_files.Pending`."""

    def __init__(self, copier: Late, number: int) -> None:
        self._copier, self._copies, self._number = copier, copier.copies, number

    def query(self) -> bool:
        if self._copier.fails == "copy":
            raise RuntimeError("a CUDA error")
        return self._number not in self._copier.busy

    def synchronize(self) -> None:
        if self._copier.fails == "copy":
            raise RuntimeError("a CUDA error")
        assert self._number not in self._copier.busy, "nobody waits for one copy while others can be begun"
        for place, source in self._copies:
            place.copy_(source)


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Late:
    monkeypatch.setattr(buffers, "is_away", lambda tensor: True)
    return Late()


@pytest.fixture
def worker(copier: Late, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outbox]:
    """A worker's side; in the end nothing may be locked, open or running."""
    monkeypatch.setattr(outbox, "_IDLE", 0.02)
    made = Outbox(copier=copier)
    yield made
    monkeypatch.setattr(outbox, "_KEPT_SECONDS", 0.0)
    made.check_integrity()
    deadline = time.monotonic() + 10
    while made._thread is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not copier.locked and not len(made._files)


def send(worker: Outbox, **saves: object) -> bytes:
    return worker.send("a trace", Reply(pack(saves, later=True), None, "", (), None))


def never(*_args: object) -> Any:
    raise AssertionError("the worker is not to be called")


def home(data: bytes) -> dict[str, Any]:
    return unpack(receive(data, "a trace", never).saves)


def inode(data: bytes) -> int:
    ticket = msgspec.msgpack.decode(data, type=Parcel).ticket
    assert ticket is not None
    return ticket.inode


def test_values_come_home_as_they_were(worker: Outbox, copier: Late) -> None:
    base = torch.randn(1200, 3000)
    saves: dict[str, Any] = {"base": base, "part": base[5:9, ::2], "bf16": base.bfloat16(), "many": [*base[:9]]}
    saves |= {
        "one": torch.tensor(3),
        "none": torch.empty(0, 4),
        "mask": base > 0,
        "conj": torch.randn(9, dtype=torch.complex64).conj(),
    }
    data = send(worker, **saves, text="x" * 1000)
    found = home(data)
    assert found.pop("text") == "x" * 1000
    for one, other in zip([*found.pop("many")], saves.pop("many"), strict=True):
        assert torch.equal(one, other)
    for name, value in saves.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        found[name].zero_()  # its own
    assert max(place.numel() for place, _ in copier.copies) <= PART < base.nbytes


def test_small_saves_come_in_one_piece_each() -> None:
    tensors = [torch.arange(n + 1.0) for n in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "is_away", lambda tensor: True)
        unsent = pack({"x": tensors, "y": 3}, later=True)
        assert isinstance(unsent, Unsent) and unsent.nbytes > 5 * 6 * 2
        now = pack({"x": tensors, "y": 3})
    plain = pack({"x": tensors, "y": 3})
    assert unsent.at_home() == now == plain


def test_a_file_is_used_again_when_all_of_it_is_gone(worker: Outbox) -> None:
    first = send(worker, a=torch.ones(BIG, dtype=torch.uint8), b=torch.ones(BIG, dtype=torch.uint8))
    saves = home(first)
    kept = saves.pop("a")[7:9]
    del saves
    other = send(worker, a=torch.zeros(2 * BIG, dtype=torch.uint8))
    assert inode(other) != inode(first) and not home(other)["a"].any()
    assert kept.tolist() == [1, 1]
    del kept
    gc.collect()
    wait_for(lambda: len(worker._files) == 2)
    again = send(worker, a=torch.full((2 * BIG,), 2, dtype=torch.uint8))
    assert inode(again) in (inode(first), inode(other))
    assert (home(again)["a"] == 2).all()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_child_of_the_client_keeps_what_it_has(worker: Outbox) -> None:
    first = send(worker, a=torch.ones(BIG, dtype=torch.uint8))
    value = home(first)["a"]
    pickup._forks().note()  # as `os.fork` does; torch's threads would not survive one here
    del value
    wait_for(lambda: len(worker._files) == 1)
    again = send(worker, a=torch.zeros(BIG, dtype=torch.uint8))
    assert inode(again) != inode(first)
    home(again)


def test_a_fork_is_noticed() -> None:
    before = pickup._forks().count
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert pickup._forks().count == before + 1


def test_saves_that_are_given_up_leave_a_free_file(worker: Outbox) -> None:
    first = send(worker, a=torch.ones(BIG, dtype=torch.uint8))
    worker.drop("a trace")
    wait_for(lambda: len(worker._files) == 1)
    again = send(worker, a=torch.zeros(BIG, dtype=torch.uint8))
    assert inode(again) == inode(first) and not home(again)["a"].any()


def test_saves_that_nobody_fetches(worker: Outbox, copier: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_SECONDS", 0.1)
    monkeypatch.setattr(outbox, "_KEPT_SECONDS", 0.1)
    send(worker, a=torch.ones(BIG, dtype=torch.uint8))
    wait_for(lambda: worker._thread is None)
    assert not copier.locked


def test_saves_of_a_request_that_runs_wait_for_its_end(worker: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_SECONDS", 0.1)
    value = torch.arange(BIG)
    data = worker.send("a trace", Reply(pack({"a": value}, later=True), None, "", (), None), held=True)
    time.sleep(0.3)
    worker.release("a trace")
    assert torch.equal(home(data)["a"], value)
    worker.send("another", Reply(pack({"a": value}, later=True), None, "", (), None), held=True)
    worker.release("another")
    wait_for(lambda: not worker._waiting)


def test_memory_that_cannot_be_locked(worker: Outbox, copier: Late, caplog: pytest.LogCaptureFixture) -> None:
    copier.fails = "lock"
    value = torch.arange(BIG)
    assert torch.equal(home(send(worker, a=value, b=value[:5]))["a"], value)
    assert "one by one: out of memory" in caplog.text
    wait_for(lambda: worker._thread is None)


def test_a_copy_that_fails(worker: Outbox, copier: Late) -> None:
    copier.fails = "copy"
    with pytest.raises(SaveError, match="could not copy them"):
        home(send(worker, a=torch.ones(BIG)))
    worker.drop("a trace")


def test_a_copy_that_takes_long_holds_up_no_other(worker: Outbox, copier: Late) -> None:
    copier.busy.add(0)
    slow = worker.send("slow", Reply(pack({"a": torch.ones(BIG)}, later=True), None, "", (), None))
    wait_for(lambda: copier.begun == 1)
    assert (home(send(worker, a=torch.zeros(BIG)))["a"] == 0).all()
    arriving = pickup.Arriving(slow, "slow", never)
    assert arriving._ticket is not None and not pickup.is_done(arriving._ticket, arriving._memory)
    copier.busy.clear()
    assert (unpack(arriving.reply().saves)["a"] == 1).all()  # type: ignore[attr-defined]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_files, "_MOST", 10 << 20)
    files = lent_files.Files()
    gone = [one for _ in range(4) for one in files.keep(File(4 << 20, lends=True), 0.0)]
    assert len(gone) == 2 and len(files) == 2
    for file in [*gone, *files.unused(1.0)]:
        file.close()
    assert len(files) == 0


@pytest.mark.parametrize("size", [1, 5, 1 << 20, (1 << 20) + 1, 33 << 20, (1 << 31) - 1])
def test_sizes_are_rounded_a_little(size: int) -> None:
    room = lent_files._rounded(size)
    assert size <= room <= size * 1.25 + 1
    assert lent_files._rounded(room) == room
