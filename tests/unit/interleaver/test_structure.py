"""Containers of all kinds: copies of them, what was changed in them, and what cannot be copied."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import pytest
import torch

from invivo.envoy.address import OUTPUT, port_at
from invivo.envoy.errors import UnsupportedError, WriteError
from invivo.interleaver.recorder import Recorder
from invivo.interleaver.structure import can_change, map_tensors, tensors_of
from invivo.interleaver.values import Held, Passing, copy_of, put_rows

X = port_at("x", OUTPUT)


@dataclass
class Out:
    h: Any
    rest: object = None


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Any


class AttrDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Pair(tuple):  # type: ignore[type-arg]
    def __new__(cls, left: object, right: object) -> Self:
        return super().__new__(cls, (left, right))

    @property
    def h(self) -> Any:
        return self[0]


class Items(list):  # type: ignore[type-arg]
    pass


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As in transformers."""

    def to_tuple(self) -> tuple[object, ...]:
        return tuple(self.values())


Named = namedtuple("Named", ["h"])  # noqa: PYI024  (what models return)

FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (Out, lambda o: o.h),
    "frozen dataclass": (Frozen, lambda o: o.h),
    "dataclass in a dataclass": (lambda t: Out(1, [Out(t)]), lambda o: o.rest[0].h),
    "dict with attributes": (lambda t: AttrDict(h=t), lambda o: o["h"]),
    "model output": (lambda t: ModelOutput(h=t), lambda o: o["h"]),
    "default dict": (lambda t: defaultdict(list, h=t), lambda o: o["h"]),
    "user dict": (lambda t: UserDict(h=t), lambda o: o["h"]),
    "mapping": (lambda t: MappingProxyType({"h": t}), lambda o: o["h"]),
    "tuple with a constructor": (lambda t: Pair(t, 1), lambda o: o.h),
    "named tuple": (Named, lambda o: o.h),
    "list subclass": (lambda t: Items([t]), lambda o: o[0]),
    "user list": (lambda t: UserList([t]), lambda o: o[0]),
    "deque": (lambda t: deque([t], maxlen=3), lambda o: o[0]),
    "torch's own tuple": (lambda t: torch.return_types.max([t, t.long()]), lambda o: o.values),  # type: ignore[call-arg, arg-type]
}


def hold(value: object) -> Held:
    copy, versions = copy_of(value, None, X)
    return Held(copy, versions, None, Passing(value, X))


@pytest.mark.parametrize("form", FORMS)
def test_a_block_has_its_own_copy_and_its_edit_goes_back(form: str) -> None:
    make, get = FORMS[form]
    value = make(torch.ones(2, 3))
    held = hold(value)
    held.settle()
    assert held.changed is None and type(held.value) is type(value)
    get(held.value)[:] = 5
    held.settle()
    assert torch.equal(get(value), torch.ones(2, 3)), "the model's own tensor is not written"
    assert held.changed is not None
    after = put_rows(value, [(held.changed, None)], X)
    assert type(after) is type(value) and torch.equal(get(after), torch.full((2, 3), 5.0))
    assert torch.equal(get(value), torch.ones(2, 3))


def test_what_else_a_container_knows_is_kept() -> None:
    value = defaultdict(list, h=torch.ones(1))
    assert map_tensors(value, torch.clone)["new"] == []  # type: ignore[index]
    pair = Pair(torch.ones(1), 1)
    pair.name = "name"  # type: ignore[attr-defined]
    assert map_tensors(pair, torch.clone).name == "name"  # type: ignore[attr-defined]
    assert map_tensors(deque([1], maxlen=3), torch.clone).maxlen == 3  # type: ignore[attr-defined]
    size = torch.Size([2, 3])
    assert map_tensors(size, torch.clone) is size


def test_containers_can_be_assigned_whole() -> None:
    held = hold(Out(torch.ones(2)))
    held.assign(Out(torch.zeros(2)), "x")
    held.settle()
    assert held.changed is not None
    for given, message in (
        (torch.ones(2), r"x takes a Out with the fields \['h', 'rest'\], and got float32 \[2\].*`x\.h\[:\] = "),
        (Out(torch.ones(3)), r"x\.h takes float32 \[2\]"),
        (Out(torch.ones(2), 1), r"x\.rest holds None, which is not a tensor"),
    ):
        with pytest.raises(WriteError, match=message):
            held.assign(given, "x")
    with pytest.raises(WriteError, match=r"takes a dict with the keys \['h'\]"):
        hold(UserDict(h=torch.ones(2))).assign(UserDict(g=torch.ones(2)), "x")


def test_fields_that_are_no_tensors_cannot_be_changed() -> None:
    held = hold(Out(torch.ones(2), 1))
    held.value.rest = 2  # type: ignore[attr-defined]
    with pytest.raises(WriteError, match=r"what the port holds\.rest holds 1, which is not a tensor"):
        held.settle()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.ones(3), lambda array: array.fill(2)),
        ({1, 2}, lambda numbers: numbers.add(3)),
    ],
)
def test_arrays_and_sets_are_copied_and_a_change_is_refused(value: Any, change: Callable[[Any], None]) -> None:
    held = hold((torch.ones(2), value))
    held.settle()
    assert held.changed is None and held.value[1] is not value  # type: ignore[index]
    before = value.copy()
    change(held.value[1])  # type: ignore[index]
    with pytest.raises(WriteError, match=r"port holds\[1\] holds .* not a tensor and cannot be replaced or changed"):
        held.settle()
    assert np.array_equal(value, before) if isinstance(value, np.ndarray) else value == before


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ((x for x in [torch.ones(1)]), "a generator"),
        ([1, iter([torch.ones(1)])], "a list_iterator"),
        ({"a": torch.ones(1)}.values(), "a dict_values"),
        ({torch.ones(1)}, "a set of tensors"),
    ],
)
def test_what_has_no_places_is_refused(value: object, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"has in it {name}"):
        copy_of(value, None, X)


def test_what_contains_itself_is_refused() -> None:
    value: list[object] = [torch.ones(1)]
    value.append(value)
    with pytest.raises(UnsupportedError, match="a list that contains itself"):
        copy_of(value, None, X)
    held = hold([torch.ones(1)])
    held.value.append(held.value)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="a list that contains itself"):
        held.settle()
    Recorder().note(X, value, None)


def test_a_class_that_cannot_be_copied_is_named() -> None:
    class Closed(dict):  # type: ignore[type-arg]
        def __copy__(self) -> Closed:
            raise RuntimeError("not me")

    with pytest.raises(UnsupportedError, match=r"Closed, of which no copy can be made \(RuntimeError: not me\)"):
        copy_of(Closed(a=torch.ones(1)), None, X)


def test_objects_of_other_classes_and_modules_stay_what_they_are() -> None:
    class Cache:
        keys = torch.ones(1)

    @dataclass(eq=False)
    class Unit(torch.nn.Module):
        scale: float = 1.0

        def __post_init__(self) -> None:
            super().__init__()

    for value in (Cache(), Unit(), Out):
        assert copy_of((value,), None, X)[0] == (value,)
        assert not can_change((value, torch.ones(1), 1)) and tensors_of(value) == []
