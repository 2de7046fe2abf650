"""Captured values: small, and equal on the other side."""

from __future__ import annotations

import json
import math
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invivo.envoy.errors import ForeignError, TransferError
from invivo.tracer.block import TracerHandle
from invivo.tracer.codec import decode, encode
from support.travel import MODEL, Stand, receive, round_trip, send


class Handle(TracerHandle):
    pass


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


def test_what_values_may_touch_is_reported() -> None:
    def draw() -> float:
        return random.random() + np.random.rand()

    assert send(f=draw).uses == {"random", "numpy", "torch", "modes", "prints"}
    assert send(x=np.ones(3), t=torch.ones(1), f=math.sqrt).uses == frozenset()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = send(dumps=json.dumps, module=json)
    monkeypatch.setitem(sys.modules, "json", None)
    with pytest.raises(TransferError, match="which the engine's Python does not have"):
        receive(encoded)
