"""Saved values: what is packed comes back equal, and no bytes whatever do anything but fail."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invivo.envoy.errors import InternalError, SaveError
from invivo.tracer.buffers import DTYPES
from invivo.tracer.nodes import VERSION, Message, Tag
from invivo.tracer.results import Packed, from_bytes, opened, pack, to_bytes, unpack


def round_trip(value: object) -> object:
    return from_bytes(to_bytes({"x": value}))["x"]


hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
values = st.recursive(
    hashable | st.complex_numbers(allow_nan=False) | st.binary().map(bytearray) | st.builds(range, st.integers()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(values)
def test_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple, deque))


@given(st.lists(st.integers(-(2**70), 2**70)))
def test_integers_have_any_size(numbers: list[int]) -> None:
    assert round_trip(numbers) == numbers


@pytest.mark.parametrize(
    "value",
    [
        slice(None, 3),
        slice(1, -1, 2),
        defaultdict(list, {1: [2]}),
        defaultdict(None, {}),
        Counter("abca"),
        deque([1, 2], maxlen=3),
        torch.Size([1, 576]),
        torch.bfloat16,
        torch.device("cuda:1"),
        np.float32(1.5),
        np.bool_(True),
        np.str_(""),
        np.datetime64("2020-01-01"),
        float("inf"),
    ],
    ids=repr,
)
def test_other_types(value: object) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)
    for name in ("maxlen", "default_factory"):
        assert getattr(back, name, None) == getattr(value, name, None)


def test_nan_stays_nan() -> None:
    back = round_trip([math.nan])
    assert isinstance(back, list)
    assert math.isnan(back[0])


@pytest.mark.parametrize("dtype", sorted(name for name in DTYPES if hasattr(torch, name)))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    size = math.prod(shape) * kind.itemsize
    raw = torch.tensor([index % 2 if dtype == "bool" else index % 251 for index in range(size)], dtype=torch.uint8)
    tensor = raw.view(kind).view(shape)
    back = round_trip(tensor)
    assert isinstance(back, torch.Tensor)
    assert back.dtype == kind
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("index", [np.s_[::2], np.s_[:, 1:3], np.s_[1], np.s_[..., None, 0]], ids=str)
def test_tensors_of_any_strides(index: object) -> None:
    tensor = torch.randn(4, 6, dtype=torch.bfloat16)[index]  # type: ignore[index]
    for view in (tensor, tensor.mT if tensor.ndim > 1 else tensor):
        assert torch.equal(round_trip(view), view)  # type: ignore[arg-type]


def test_conjugated_and_negated_views() -> None:
    tensor = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(round_trip(tensor), tensor.resolve_conj())  # type: ignore[arg-type]
    assert torch.equal(round_trip(tensor.imag), tensor.imag)  # type: ignore[arg-type]


def test_tensors_come_home_detached_and_writable() -> None:
    back = round_trip(torch.nn.Parameter(torch.ones(3)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad
    back += 1
    assert back.tolist() == [2, 2, 2]


def test_inference_mode_leaves_no_trace() -> None:
    with torch.inference_mode():
        data = to_bytes({"x": torch.ones(3), "y": torch.ones(3, dtype=torch.bfloat16)[::2]})
        back = from_bytes(data)["x"]
    assert isinstance(back, torch.Tensor)
    assert not back.is_inference()
    back.add_(1)
    made_outside = from_bytes(data)["y"]
    assert isinstance(made_outside, torch.Tensor)
    made_outside.add_(1)


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        back = round_trip(torch.ones(2, device="cpu"))
    assert isinstance(back, torch.Tensor)
    assert back.device.type == "cpu"


def test_unpacked_values_share_no_memory_with_the_message() -> None:
    data = bytearray(to_bytes({"x": torch.zeros(4), "a": np.zeros(4)}))
    saves = from_bytes(data)
    data[:] = b"\xff" * len(data)
    assert saves["x"].tolist() == saves["a"].tolist() == [0] * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.array(3),
        np.empty((0, 2), "i2"),
        np.array(["a", "bcd"]),
        np.array([b"a"]),
        np.array(["2020", "2021"], "M8[D]"),
        np.arange(3, dtype=">u4"),
        np.array([True]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_numpy_arrays(array: np.ndarray) -> None:
    back = round_trip(array)
    assert isinstance(back, np.ndarray)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_results_of_torch_functions_keep_their_names() -> None:
    back = round_trip(torch.tensor([1.0, 3.0, 2.0]).topk(2))
    assert type(back) is torch.return_types.topk  # type: ignore[attr-defined]
    assert back.indices.tolist() == [1, 2]


def test_identity_is_kept_across_names() -> None:
    tensor, items = torch.ones(1), [1]
    back = unpack(pack({"a": tensor, "b": [tensor, items], "c": (items, items)}))
    assert back["b"][0] is back["a"]  # type: ignore[index]
    assert back["c"][0] is back["c"][1] is back["b"][1]  # type: ignore[index]


def test_containers_may_contain_themselves() -> None:
    items: list[object] = [1]
    items.append({"items": items})
    back = round_trip(items)
    assert back[1]["items"] is back  # type: ignore[index]
    pair: tuple[list[object]] = ([],)
    pair[0].append(pair[0])
    back = round_trip(pair)
    assert back[0][0] is back[0]  # type: ignore[index]
    pair[0].append(pair)
    with pytest.raises(SaveError, match="tuple that contains itself"):
        pack({"x": pair})


class Color(IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


def given_back() -> torch.Tensor:
    """A tensor with more elements than memory, as training libraries leave them: reading it could end the process."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(4)
    return tensor


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the plain kind is what is refused


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, {"x": object()}], '`hs[1]["x"]` cannot be saved: its type is object'),
        ({3: [0, print]}, "`hs[3][1]` cannot be saved: its type is builtin_function_or_method"),
        ({(1, object): 2}, "`hs (key "),
        (Color.RED, "subclass of int; save `int(x)`"),
        (Text("a"), "subclass of str; save `str(x)`"),
        (Point(1, 2), "named tuple"),
        (defaultdict(lambda: 1), "defaultdict with <lambda> as its factory; save `dict(x)`"),
        (np.array([object()]), "numpy array of dtype object"),
        (torch.ones(2, device="meta"), "meta tensor has a shape but no values"),
        (torch.eye(2).to_sparse(), r"use `.to_dense()`"),
        ("\ud800", "surrogates not allowed"),
        (given_back(), "a tensor whose memory was given back"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_name_the_place(value: object, message: str) -> None:
    with pytest.raises(SaveError) as caught:
        pack({"hs": value})
    assert message in str(caught.value)


def test_deep_nesting_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SaveError, match="nested too deeply"):
        pack({"x": deep})


class Bomb:
    exploded = False

    def __reduce__(self) -> tuple[object, ...]:
        return setattr, (Bomb, "exploded", True)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_fail_cleanly(data: bytes) -> None:
    with pytest.raises(InternalError):
        from_bytes(data)


def test_a_pickle_is_not_loaded() -> None:
    with pytest.raises(InternalError):
        from_bytes(pickle.dumps(Bomb()))
    assert not Bomb.exploded


nodes = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(st.sampled_from(list(Tag)), inner, inner, inner).map(list)
        | st.tuples(st.sampled_from(list(Tag)), inner, inner).map(list)
        | st.tuples(st.sampled_from(list(Tag)), inner).map(list)
        | st.tuples(st.sampled_from(list(Tag)), st.lists(inner, max_size=3)).map(list)
    ),
    max_leaves=12,
)


def message_of(node: object, buffers: list[bytes]) -> Packed:
    head = msgspec.msgpack.encode(Message(VERSION, [("x", node)]))
    return Packed(head, list(map(memoryview, buffers)))


@settings(max_examples=500)
@given(nodes, st.lists(st.binary(max_size=16), max_size=3))
def test_wrong_trees_fail_cleanly_or_make_plain_values(node: object, buffers: list[bytes]) -> None:
    try:
        back = unpack(message_of(node, buffers))["x"]
    except InternalError:
        return
    assert type(back).__module__ in ("builtins", "collections", "torch", "numpy", "torch.return_types")


@settings(max_examples=200)
@given(st.data())
def test_damaged_messages_fail_cleanly(data: st.DataObject) -> None:
    good = bytearray(to_bytes({"a": torch.ones(2, 3), "b": [1, {"c": (2.0, "d")}], "e": np.ones(3), "f": deque([1])}))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for bad in (good, good[:cut]):
        with contextlib.suppress(InternalError):
            from_bytes(bad)


def test_a_buffer_cannot_be_multiplied() -> None:
    tensor = [int(Tag.TENSOR), "uint8", [4], 0]
    with pytest.raises(InternalError, match="used twice"):
        unpack(message_of([int(Tag.LIST), [tensor, tensor]], [b"1234"]))


def test_the_version_is_checked() -> None:
    with pytest.raises(InternalError, match="format 9"):
        unpack(Packed(msgspec.msgpack.encode(Message(9, [])), []))


def test_packing_changes_nothing() -> None:
    value = {"a": [torch.ones(2)], "b": {1, 2}}
    before = copy.deepcopy(value)
    pack(value)
    assert repr(value) == repr(before)


def test_packing_copies_no_elements() -> None:
    tensor, array = torch.ones(4, 3, dtype=torch.bfloat16), np.array(["2020", "2021"], "M8[D]")
    packed = pack({"a": tensor, "b": array, "c": tensor.T})
    tensor.zero_()
    array[:] = np.datetime64("1970-01-01", "D")
    assert [bytes(buffer).strip(b"\0") for buffer in packed.buffers[:2]] == [b"", b""]
    assert all(buffer.readonly and buffer.format == "B" for buffer in packed.buffers)
    assert packed.nbytes == len(packed.head) + 24 + 16 + 24


def test_values_are_made_on_writable_buffers_and_keep_them_alive() -> None:
    packed = pack({"a": torch.ones(3), "b": np.ones(2), "c": torch.zeros(0)})
    own = [bytearray(buffer) for buffer in packed.buffers]
    back: dict[str, Any] = unpack(Packed(packed.head, [memoryview(buffer) for buffer in own]))
    back["a"] += 1
    back["b"][0] = 5
    assert np.frombuffer(own[0], "f4").tolist() == [2, 2, 2]
    assert np.frombuffer(own[1], "f8").tolist() == [5, 1]
    with pytest.raises(BufferError):
        own[0].clear()  # the tensor holds it
    del back
    own[0].clear()


def test_two_views_of_one_tensor_are_two_tensors_at_home() -> None:
    base = torch.arange(6.0)
    packed = pack({"a": base, "b": base[1:3], "c": base})
    assert [len(buffer) for buffer in packed.buffers] == [24, 8]  # the same tensor goes once, a view by itself
    back: dict[str, Any] = unpack(packed)
    assert back["a"] is back["c"]
    back["b"].zero_()
    assert back["a"].tolist() == [0, 1, 2, 3, 4, 5]


def test_tensors_of_a_prompt_and_of_single_tokens_are_few_buffers() -> None:
    row = torch.arange(4.0)
    values = [torch.ones(7, 4), *(row + n for n in range(20)), torch.zeros(2, dtype=torch.int64), row, torch.ones(2, 2)]
    packed = pack({"values": values, "again": [values[3], row]})
    assert len(packed.buffers) == 5
    found: Any = unpack(packed)
    assert all(torch.equal(one, other) for one, other in zip(values, found["values"], strict=True))
    assert found["again"][0] is found["values"][3] and found["again"][1] is found["values"][-2]


def test_values_that_are_read_ahead_are_read_once() -> None:
    ahead = opened(pack({"x": torch.arange(3.0), "n": 3}))
    values = unpack(ahead)
    assert unpack(ahead) is values
    assert torch.equal(values["x"], torch.arange(3.0)) and values["n"] == 3  # type: ignore[arg-type]
    with pytest.raises(InternalError):
        opened(Packed(b"no message", []))
