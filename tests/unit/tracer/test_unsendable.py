"""What cannot travel is refused, by the name of the variable that it was found in."""

from __future__ import annotations

import functools
import io
import socket
import threading
from pathlib import Path

import pytest
import torch

from invivo.envoy.errors import TransferError
from support.travel import round_trip, send


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


LOCK = threading.Lock()


def uses_lock() -> None:
    LOCK.acquire()


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        (threading.Lock(), ["`bad` is a _thread.lock, and locks live in this process"]),
        ({"a": [1, threading.RLock()]}, ['`bad["a"][1]` is a _thread.RLock, and locks']),
        (Holder(threading.Event()), ["`bad.value` is a threading.Event"]),
        (uses_lock, ["`bad -> global `LOCK`` is a _thread.lock"]),
        ((x for x in ()), ["`bad` is a generator, and a generator has no value to send; make a list of it"]),
        (torch.ones(1, device="meta"), ["`bad` is a torch.Tensor, and a meta tensor has a shape but no values"]),
        (torch.eye(2).to_sparse(), ["use `.to_dense()`"]),
        (functools.partial(print, threading.Lock()), ["`bad.args[0]` is a _thread.lock"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refusals_name_the_variable(value: object, messages: list[str]) -> None:
    with pytest.raises(TransferError) as caught:
        send(good=1, bad=value)
    for message in ["The block reads `bad`, which cannot be sent to the engine:", *messages]:
        assert message in str(caught.value)
    assert caught.value.__cause__ is None


def test_files_and_sockets_are_refused(tmp_path: Path) -> None:
    with open(tmp_path / "f", "w") as file, pytest.raises(TransferError, match="an open file lives in this process"):
        send(file=file)
    with socket.socket() as made, pytest.raises(TransferError, match="a connection lives in this process"):
        send(made=made)
    assert round_trip(io.BytesIO(b"x")).getvalue() == b"x"


def test_a_value_whose_pickling_raises_anything() -> None:
    class Odd:
        def __reduce__(self) -> str:
            raise KeyError("odd")

    with pytest.raises(TransferError, match=r"Odd, and pickle refuses it \(KeyError: 'odd'\)"):
        send(odd=Odd())


def test_deep_nesting_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TransferError, match="nested too deeply"):
        send(deep=deep)
