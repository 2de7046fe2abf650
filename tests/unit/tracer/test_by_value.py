"""The caller's own functions, classes and modules travel by value, installed ones by name."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import json
import math
import os.path
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from invivo.envoy.errors import TransferError
from invivo.tracer import block, by_value
from support.travel import receive, round_trip, send

FACTOR = 3


def helper(x: float, *, power: int = 2) -> float:
    return math.sqrt(x) ** power * FACTOR


class Probe:
    shared: list[int] = []  # noqa: RUF012 - a class attribute that must not be copied into the caller's class

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: float) -> float:
        return helper(x) + float(self.weight.sum())


@dataclasses.dataclass
class Settings:
    layer: int
    names: list[str] = dataclasses.field(default_factory=list)


class Mode(enum.Enum):
    ADD = "add"


def test_own_functions_keep_file_name_and_globals() -> None:
    back = round_trip(helper)
    assert back is not helper
    assert back(4) == helper(4) == 12
    assert back.__code__.co_filename == __file__
    assert back.__module__ == __name__
    assert back.__kwdefaults__ == {"power": 2}


def test_closures_and_recursion() -> None:
    def fact(n: int) -> int:
        return 1 if n == 0 else n * fact(n - 1) * one

    one = 1
    assert round_trip(fact)(5) == 120
    assert round_trip(functools.partial(helper, power=4))(4) == 48
    assert round_trip(lambda: later)  # the cell is still empty
    later = 1


def test_functions_share_their_globals() -> None:
    space: dict[str, Any] = {"__name__": "loose", "count": 0}
    exec("def add():\n    global count\n    count += 1\ndef get():\n    return count", space)
    add, get = round_trip((space["add"], space["get"]))
    add()
    assert (get(), space["count"]) == (1, 0)


def test_submodules_are_loaded() -> None:
    def walk() -> object:
        return os.path.join("a", "b"), torch.nn.functional.relu(torch.ones(1))

    assert round_trip(walk)()[0] == os.path.join("a", "b")


def test_own_objects_come_back_to_their_process_with_their_own_class() -> None:
    items = Probe.shared
    back = round_trip(Probe(torch.ones(2)))
    assert type(back) is Probe
    assert back(4) == 14
    assert Probe.shared is items
    assert round_trip(Settings(3, ["a"])) == Settings(3, ["a"])
    assert round_trip(Mode.ADD) is Mode.ADD


def test_callables() -> None:
    calls: list[Callable[[float], float]] = [helper, Probe(torch.zeros(1))]
    assert [call(4) for call in round_trip(calls)] == [12, 12]


def test_another_process_needs_none_of_the_callers_modules(tmp_path: Path) -> None:
    class Local(Probe):
        """Made in a function."""

    encoded = send(helper=helper, probe=Local(torch.ones(2)), settings=Settings(3), mode=Mode.ADD, kind=KeyError)
    script = textwrap.dedent(
        """
        import pickle, sys
        from invivo.tracer.block import TensorBlob
        from invivo.tracer.codec import decode
        data, tensors = pickle.loads(sys.stdin.buffer.read())
        x = decode(data, [TensorBlob(*t) for t in tensors], envoy=str, tracer=None)["local"]
        print(x["helper"](4), x["probe"](4), x["settings"].layer, x["mode"].value, x["kind"] is KeyError)
        print(x["settings"], type(x["probe"]).__mro__[1].__name__)
        """
    )
    sent = [[blob.dtype, blob.shape, blob.data] for blob in encoded.tensors]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        input=cloudpickle.dumps((encoded.data, sent)),
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stderr.decode() == ""
    assert done.stdout.decode().split("\n")[:2] == ["12.0 14.0 3 add True", "Settings(layer=3, names=[]) Probe"]


def test_installed_things_travel_by_name() -> None:
    encoded = send(a=torch.nn.functional.relu, b=json.dumps, c=np, d=Path, e=torch.nn.Linear, f=print)
    assert len(encoded.data) < 400
    back = receive(encoded)
    assert back["a"] is torch.nn.functional.relu
    assert back["b"] is json.dumps
    assert back["c"] is np
    assert back["d"] is Path
    assert round_trip(torch.ops) is torch.ops
    assert round_trip(torch.ops.aten) is torch.ops.aten


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    source = """
        import json
        import threading

        LOCK = threading.Lock()
        SCALE = 2

        def scaled(x):
            return x * SCALE

        class Error(Exception):
            pass
        """
    (tmp_path / "own_module_of_the_test.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_module_of_the_test")
    del sys.modules["own_module_of_the_test"]


def test_own_modules_travel_by_value(own_module: ModuleType) -> None:
    back = round_trip(own_module)
    assert back is not own_module
    assert back.scaled(3) == 6
    assert back.json is json
    assert back.Error is own_module.Error
    with pytest.raises(TransferError, match=r"`own_module_of_the_test.LOCK` was not sent to the engine: locks"):
        back.LOCK
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        back.nothing


def test_the_registry_of_cloudpickle_is_left_as_it_was(own_module: ModuleType) -> None:
    before = cloudpickle.list_registry_pickle_by_value()
    send(error=own_module.Error)
    with pytest.raises(TransferError):
        send(error=own_module.Error, lock=threading.Lock())
    assert cloudpickle.list_registry_pickle_by_value() == before
    cloudpickle.register_pickle_by_value(own_module)
    try:
        send(error=own_module.Error)
        assert own_module.__name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(own_module)


def test_threads_may_encode_at_once(own_module: ModuleType) -> None:
    failures = []

    def work() -> None:
        try:
            for _ in range(50):
                assert receive(send(f=own_module.scaled, e=own_module.Error))["f"](2) == 4
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_another_python_is_named() -> None:
    parts = by_value.code_parts(helper.__code__)[1]
    with pytest.raises(TransferError, match=r"`helper` \(.*test_by_value.py:\d+\) was compiled by Python 3.7"):
        by_value.make_code((3, 7), *parts[1:])


@pytest.mark.parametrize("value", [torch, np, sys, math, block, pytest, os.path])
def test_what_is_installed(value: ModuleType) -> None:
    assert by_value.is_installed(value)


def test_what_is_not_installed() -> None:
    assert not by_value.is_installed(sys.modules[__name__])
    assert not by_value.is_installed(sys.modules["__main__"])
    assert not by_value.is_installed(ModuleType("made_here"))
