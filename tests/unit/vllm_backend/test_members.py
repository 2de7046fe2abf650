"""Which requests of a trace wait for which."""

from __future__ import annotations

from invivo.tracer.block import Group
from invivo.vllm_backend.members import Members


def group(
    index: int, *, takes: tuple[tuple[str, int], ...] = (), barriers: tuple[tuple[str, int], ...] = (), size: int = 2
) -> Group:
    return Group("trace", index, size, takes, (), barriers)


def test_one_that_takes_a_value_waits_for_the_block_that_gives_it() -> None:
    members = Members()
    members.add("a", group(0))
    members.add("b", group(1, takes=(("h", 0),)))
    assert not members.waits("a", set()) and members.waits("b", set())
    members.block_ended("a")
    assert not members.waits("b", set())


def test_the_end_of_the_request_counts_too() -> None:
    members = Members()
    members.add("a", group(0))
    members.add("b", group(1, takes=(("h", 0),)))
    members.remove("a")
    assert not members.waits("b", set())
    members.remove("b")
    assert len(members) == 0


def test_the_giver_may_come_late() -> None:
    members = Members()
    members.add("b", group(1, takes=(("h", 0),)))
    assert members.waits("b", set())
    members.add("a", group(0))
    assert members.waits("b", set())


def test_at_a_barrier_the_later_ones_wait_until_the_earlier_ones_stand_there() -> None:
    meeting = (("meet", 3),)
    members = Members()
    for index, name in enumerate("abc"):
        members.add(name, group(index, barriers=meeting, size=3))
    assert [members.waits(name, set()) for name in "abc"] == [False, True, True]
    assert [members.waits(name, {"a"}) for name in "abc"] == [False, False, True]
    assert [members.waits(name, {"a", "b"}) for name in "abc"] == [False, False, False]


def test_traces_and_single_requests_do_not_see_each_other() -> None:
    members = Members()
    members.add("a", Group("one", 0, 1, (), (), (("meet", 2),)))
    members.add("b", Group("two", 1, 2, (), (), (("meet", 2),)))
    assert not members.waits("b", set()) and not members.waits("unknown", set())


def test_a_trace_of_which_no_more_comes_is_forgotten() -> None:
    members = Members()
    members.add("a", group(0, size=3))
    members.add("b", group(1, size=3))
    assert not members.complete("a")
    members.remove("a", aborted=True)
    members.remove("b", aborted=True)
    assert len(members) == 0 and not members._seen
    members.add("a", group(0, size=1))
    assert members.complete("a")
