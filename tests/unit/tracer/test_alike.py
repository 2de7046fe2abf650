"""Lists of small tensors of one dtype and shape travel as one buffer, and come back as what they were."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invivo.envoy.errors import InternalError
from invivo.tracer.buffers import DTYPES
from invivo.tracer.nodes import VERSION, Message, Tag
from invivo.tracer.results import Packed, from_bytes, pack, to_bytes, unpack


def round_trip(value: object) -> Any:
    return from_bytes(to_bytes({"x": value}))["x"]


def numbered(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.full(shape, float(at), dtype=dtype) for at in range(count)]


def test_they_are_one_buffer_at_once_and_at_every_depth() -> None:
    layers = [numbered(6, 1, 8) for _ in range(5)]
    assert len(pack({"x": numbered(100, 1, 8)}).buffers) == 1
    assert len(pack({"x": layers}).buffers) == 5
    back = round_trip(layers)
    assert [[tensor.tolist() for tensor in step] for step in back] == [[t.tolist() for t in step] for step in layers]


@pytest.mark.parametrize("dtype", sorted(DTYPES - {"complex32"}))
def test_of_every_dtype(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = [tensor.to(kind) for tensor in numbered(5, 3)]
    for one, other in zip(round_trip(tensors), tensors, strict=True):
        assert one.dtype == kind and one.shape == other.shape
        assert one.view(torch.uint8).tolist() == other.view(torch.uint8).tolist()


def test_each_is_a_tensor_of_its_own() -> None:
    back = round_trip(numbered(8, 2, 3))
    assert all(tensor.untyped_storage().nbytes() == 24 and not tensor.is_inference() for tensor in back)
    back[0].zero_().resize_(1)
    assert [tensor[0, 0].item() for tensor in back[1:]] == list(range(1, 8))
    with torch.inference_mode():
        saved = [tensor * 1 for tensor in numbered(4, 2)]
        assert not any(tensor.is_inference() for tensor in round_trip(saved))


ONE = torch.ones(2)
OTHERS: dict[str, list[Any]] = {
    "of several shapes": [torch.ones(2), torch.ones(1), torch.ones(2), torch.ones(2)],
    "of several dtypes": [*numbered(3, 2), torch.ones(2, dtype=torch.float64)],
    "one of them twice": [*numbered(4, 2), ONE, ONE],
    "with something else between": [*numbered(4, 2), None, *numbered(4, 2)],
    "without elements": [torch.ones(0, 2) for _ in range(5)],
    "a few": numbered(3, 2),
    "parameters": [torch.nn.Parameter(torch.ones(2)) for _ in range(5)],
}


@pytest.mark.parametrize("tensors", OTHERS.values(), ids=OTHERS)
def test_others_travel_one_by_one(tensors: list[Any]) -> None:
    assert len(pack({"x": tensors}).buffers) == len({id(tensor) for tensor in tensors if tensor is not None})
    back = round_trip(tensors)
    for one, other in zip(back, tensors, strict=True):
        assert one is None if other is None else (one.dtype == other.dtype and torch.equal(one, other))


def test_large_ones_are_not_copied() -> None:
    tensors = [torch.zeros(1 << 20) for _ in range(4)]
    packed = pack({"x": tensors})
    tensors[2][0] = 7
    assert unpack(packed)["x"][2][0] == 7  # type: ignore[index]


def test_identity_is_kept() -> None:
    tensors = numbered(5, 2)
    back = round_trip({"list": tensors, "again": tensors[3], "and again": [tensors[1]] * 4})
    assert back["again"] is back["list"][3]
    assert all(tensor is back["list"][1] for tensor in back["and again"])


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=6), max_size=5))
def test_identity_is_kept_in_any_arrangement(arrangement: list[list[int]]) -> None:
    tensors = numbered(10, 2)
    value = [[tensors[at] for at in row] for row in arrangement]
    back = round_trip(value)
    assert [[tensor[0].item() for tensor in row] for row in back] == arrangement
    first: dict[int, Any] = {}
    for row, numbers in zip(back, arrangement, strict=True):
        for tensor, number in zip(row, numbers, strict=True):
            assert first.setdefault(number, tensor) is tensor


def test_gradients_and_strides_stay_behind() -> None:
    weight = torch.ones(2, requires_grad=True)
    back = round_trip([weight * at for at in range(5)])
    assert not any(tensor.requires_grad for tensor in back)
    assert [t.tolist() for t in round_trip([torch.arange(6.0).view(2, 3).T + at for at in range(4)])][1] == [
        [1, 4],
        [2, 5],
        [3, 6],
    ]


@pytest.mark.parametrize("shape", [[1 << 60, 0], [4, 3], [-1, 2], [8]])
def test_bytes_that_nobody_wrote_fail_cleanly(shape: list[int]) -> None:
    data = memoryview(bytes(4 * max(abs(math.prod(shape)) % 7, 1)))
    tree: list[tuple[str, Any]] = [("x", [Tag.LIST, [[Tag.ALIKE, "float32", shape, 0]]])]
    with pytest.raises(InternalError, match="cannot be read"):
        unpack(Packed(msgspec.msgpack.encode(Message(VERSION, tree)), [data]))
