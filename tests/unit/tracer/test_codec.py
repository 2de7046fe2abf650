"""Captured values: small, equal on the other side, and refused by name where they cannot travel."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import io
import json
import math
import os.path
import random
import socket
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
from hypothesis import given
from hypothesis import strategies as st

from invivo.envoy.envoy import Envoy
from invivo.envoy.errors import ForeignError, TransferError
from invivo.tracer import block, by_value
from invivo.tracer.block import TracerHandle
from invivo.tracer.codec import Encoded, decode, encode

FACTOR = 3


class Stand(Envoy):
    """An Envoy without a tree."""

    def __init__(self, address: str = "", root: Envoy | None = None) -> None:
        self._address = address
        self._root = self if root is None else root

    def __repr__(self) -> str:
        return f"Stand({self._address!r})"


class Handle(TracerHandle):
    pass


MODEL = Stand()


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


def send(**names: object) -> Encoded:
    return encode({"local": names, "global": {}}, MODEL)


def receive(encoded: Encoded, **more: Any) -> dict[str, Any]:
    return decode(encoded.data, encoded.tensors, envoy=lambda a: ("envoy", a), tracer="tracer", **more)["local"]


def round_trip(value: object) -> Any:
    return receive(send(x=value))["x"]


@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    )
)
def test_plain_values(value: object) -> None:
    assert round_trip(value) == value


def test_envoys_travel_as_addresses() -> None:
    layer = Stand("model.layers.5", MODEL)
    assert receive(send(model=MODEL, layers=[layer, layer])) == {
        "model": ("envoy", ""),
        "layers": [("envoy", "model.layers.5")] * 2,
    }


def test_the_tracer_is_put_in_place() -> None:
    assert round_trip([Handle()]) == ["tracer"]


def test_an_envoy_of_another_model_is_refused() -> None:
    with pytest.raises(ForeignError, match=r"`x\[1\]` cannot be used in this trace: the Envoy `lm_head` belongs"):
        send(x=[1, Stand("lm_head", Stand())])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(576),
        torch.randn(4, 6).bfloat16().T[1:],
        torch.tensor(True),
        torch.empty(0, 3),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.arange(3),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_tensors(tensor: torch.Tensor) -> None:
    back = round_trip(tensor)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_one_tensor_stays_one_across_scopes() -> None:
    tensor = torch.ones(3)
    encoded = encode({"local": {"a": tensor, "b": [tensor]}, "global": {"c": tensor}}, MODEL)
    assert len(encoded.tensors) == 1
    back = decode(encoded.data, encoded.tensors, envoy=str, tracer=None)
    assert back["local"]["a"] is back["local"]["b"][0] is back["global"]["c"]


def test_decoded_tensors_are_normal_and_writable() -> None:
    with torch.inference_mode():
        encoded = send(x=torch.ones(2))
        back = receive(encoded)["x"]
    assert not back.is_inference()
    back.add_(1)
    parameter = round_trip(torch.nn.Parameter(torch.ones(2)))
    assert type(parameter) is torch.Tensor
    assert not parameter.requires_grad
    parameter += 1


def test_tensors_go_to_the_device() -> None:
    assert receive(send(x=torch.ones(2)), device=torch.device("meta"))["x"].is_meta
    assert receive(send(x=torch.ones(2)), device=torch.device("cpu"))["x"].tolist() == [1, 1]


def test_a_module_of_torch_runs() -> None:
    linear = torch.nn.Linear(3, 2)
    x = torch.ones(3)
    assert torch.equal(round_trip(linear)(x), linear(x))


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


def test_sources_of_random_numbers_are_reported() -> None:
    def draw() -> float:
        return random.random() + np.random.rand()

    assert send(f=draw).uses == {"random", "numpy", "torch"}
    assert send(x=np.ones(3), t=torch.ones(1), f=math.sqrt).uses == frozenset()


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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = send(dumps=json.dumps, module=json)
    monkeypatch.setitem(sys.modules, "json", None)
    with pytest.raises(TransferError, match="which the engine's Python does not have"):
        receive(encoded)


def test_another_python_is_named() -> None:
    parts = by_value.code_parts(helper.__code__)[1]
    with pytest.raises(TransferError, match=r"`helper` \(.*test_codec.py:\d+\) was compiled by Python 3.7"):
        by_value.make_code((3, 7), *parts[1:])


@pytest.mark.parametrize("value", [torch, np, sys, math, block, pytest, os.path])
def test_what_is_installed(value: ModuleType) -> None:
    assert by_value.is_installed(value)


def test_what_is_not_installed() -> None:
    assert not by_value.is_installed(sys.modules[__name__])
    assert not by_value.is_installed(sys.modules["__main__"])
    assert not by_value.is_installed(ModuleType("made_here"))


def test_callables() -> None:
    calls: list[Callable[[float], float]] = [helper, Probe(torch.zeros(1))]
    assert [call(4) for call in round_trip(calls)] == [12, 12]
