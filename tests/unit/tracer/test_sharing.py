"""Containers that several payloads refer to, and the executor has once."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import pytest
import torch

from invivo.envoy.envoy import RootEnvoy
from invivo.envoy.errors import MisuseError, TransferError
from invivo.envoy.tree import ModuleTree
from invivo.interleaver.group import Groups
from invivo.tracer.barrier import Barrier
from invivo.tracer.block import Group
from invivo.tracer.codec import decode, encode
from invivo.tracer.sharing import Sharing

MODEL = RootEnvoy(ModuleTree.of(torch.nn.Sequential()), "")


def groups(sharing: Sharing, size: int, saved: dict[str, object] | None = None) -> list[Group]:
    home = sharing.home(saved or {})
    batches = tuple(sharing.batches)
    return [Group("t", index, size, (), (), (), batches, home) for index in range(size)]


def send(sharing: Sharing, values: dict[str, object]) -> Any:
    """Encode the variables of one block."""
    encoded = encode({"local": values}, MODEL, sharing.key)
    sharing.settle()
    return encoded


def receive(member: Any, encoded: Any) -> dict[str, Any]:
    """Decode them where the block runs."""
    read = partial(decode, envoy=lambda address: MODEL, tracer=None)
    member.load(read)
    values: dict[str, Any] = read(encoded.data, encoded.tensors, shared=member.shared)["local"]
    return values


KINDS: list[Any] = [
    [1, 2],
    {"a": 1},
    {1, 2},
    bytearray(b"ab"),
    deque([1, 2], maxlen=5),
    OrderedDict(a=1),
    Counter("aab"),
    defaultdict(list, a=[1]),
    [],
    {},
]


@pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)
def test_each_kind_is_one_object(value: Any) -> None:
    sharing = Sharing(MODEL, ())
    sharing.consider([value])
    sent = [send(sharing, {"x": value}), send(sharing, {"y": (value, 1)})]
    store = Groups()
    first, second = (store.join(group) for group in groups(sharing, 2))
    one = receive(first, sent[0])["x"]
    other = receive(second, sent[1])["y"][0]
    assert one is other and one == value and type(one) is type(value)
    assert getattr(one, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(one, "default_factory", None) == getattr(value, "default_factory", None)


def test_containers_in_each_other_and_in_functions() -> None:
    inner: list[Any] = [torch.ones(2)]
    around: dict[str, Any] = {"inner": inner}
    inner.append(around)
    sharing = Sharing(MODEL, ())
    sharing.consider([(around, 3)])

    def note(item: object) -> None:
        inner.append(item)

    sent = [send(sharing, {"around": around}), send(sharing, {"note": note})]
    store = Groups()
    members = [store.join(group) for group in groups(sharing, 2, {"both": (inner, 5), "plain": [1]})]
    found = receive(members[0], sent[0])["around"]
    receive(members[1], sent[1])["note"]("new")
    assert found["inner"][1] is found and found["inner"][2] == "new" and torch.equal(found["inner"][0], torch.ones(2))
    assert members[0].leave() is None
    assert len(store) == 1
    home = members[1].leave()
    assert home is not None and list(home) == ["both"], "what is not shared stays with the caller"
    both: Any = home["both"]
    assert both[0] is found["inner"] and both[1] == 5
    assert len(store) == 0


def test_only_what_the_body_made_or_saved() -> None:
    theirs, saved, made, unknown = [1], [2], [3], [4]
    sharing = Sharing(MODEL, [{"deep": (theirs, saved)}])
    sharing.consider([theirs, saved, made])
    sharing.save(saved)
    assert sharing.key(theirs) is None and sharing.key(unknown) is None
    assert {sharing.key(saved), sharing.key(made)} == {"0", "1"}
    with pytest.raises(MisuseError, match="Save it before the first invoke"):
        sharing.save(theirs)


def test_contents_are_those_of_the_first_use() -> None:
    value = [torch.zeros(2)]
    sharing = Sharing(MODEL, ())
    sharing.consider([value])
    sent = send(sharing, {"x": value})
    value[0] += 1
    sharing.check_unchanged({"x": value})
    assert torch.equal(receive(Groups().join(groups(sharing, 1)[0]), sent)["x"][0], torch.zeros(2))
    value.append(torch.ones(1))
    with pytest.raises(MisuseError, match="`x` was changed in the body around the invokes"):
        sharing.check_unchanged({"x": value})


def test_what_cannot_be_sent_is_named() -> None:
    value = {"file": open(__file__, encoding="utf-8")}  # noqa: SIM115
    sharing = Sharing(MODEL, ())
    sharing.consider([value])
    try:
        with pytest.raises(TransferError, match="an open file lives in this process"):
            send(sharing, {"x": value})
    finally:
        value["file"].close()


def test_every_block_that_reads_a_container_refers_to_the_barriers_in_it() -> None:
    nested: dict[str, object] = {"deep": [3, (Barrier("0", 2), "text")]}
    outer = [nested, Barrier("1", 3), bytearray(b"x"), [*range(9)]]
    sharing = Sharing(MODEL, [])
    sharing.consider([outer, nested])
    found = []
    for values in ({"x": 5}, {"outer": outer}, {"x": 5}, {"outer": outer}, {"nested": nested}, {"x": 5}):
        encode({"local": values}, MODEL, sharing.key)
        found.append(dict(sharing.settle()))
    assert found == [{}, {"0": 2, "1": 3}, {}, {"0": 2, "1": 3}, {"0": 2}, {}]
