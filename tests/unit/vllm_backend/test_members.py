"""Which requests of a trace wait for which."""

from __future__ import annotations

from invivo.tracer.block import Group
from invivo.vllm_backend.members import Members

MEETING = (("meet", 3),)


def three() -> Members:
    members = Members()
    for index, name in enumerate("abc"):
        members.add(name, Group("trace", index, 3, (), (), MEETING))
    return members


def test_at_a_barrier_the_later_ones_wait_until_the_earlier_ones_stand_there() -> None:
    members = three()
    assert [members.waits(name, set()) for name in "abc"] == [False, True, True]
    assert [members.waits(name, {"a"}) for name in "abc"] == [False, False, True]
    assert [members.waits(name, {"a", "b"}) for name in "abc"] == [False, False, False]


def test_nobody_waits_for_a_block_that_has_ended() -> None:
    members = three()
    members.block_ended("a")
    assert [members.waits(name, set()) for name in "bc"] == [False, True]
    members.remove("b")
    assert not members.waits("c", set())
    for name in "abc":
        members.remove(name)
    assert len(members) == 0


def test_other_barriers_and_other_traces_are_not_waited_for() -> None:
    members = Members()
    members.add("a", Group("one", 0, 2, (), (), (("meet", 2),)))
    members.add("b", Group("two", 1, 2, (), (), (("meet", 2),)))
    members.add("c", Group("one", 1, 2, (), (), (("other", 2),)))
    assert not any(members.waits(name, set()) for name in ("b", "c", "unknown"))


def test_those_that_share_something_are_known_until_their_blocks_have_ended() -> None:
    members = three()
    members.add("d", Group("trace", 3, 4, (), ("x",), ()))
    assert [members.shares(name) for name in "abcde"] == [True, True, True, False, False]
    assert [members.shared(name) for name in "abcde"] == ["trace", "trace", "trace", None, None]
    members.block_ended("b")
    assert members.shared("b") is None and members.shares("b")
