"""Which invokes wait for which."""

from __future__ import annotations

import pytest

from invivo.envoy.errors import MisuseError
from invivo.tracer.block import Group
from invivo.tracer.dependencies import check_barriers, ends_before, meets


def groups(*invokes: tuple[dict[str, int], dict[str, int]]) -> list[Group]:
    """Groups of invokes that are given as what each takes, and its barriers."""
    return [
        Group("t", index, len(invokes), tuple(takes.items()), (), tuple(barriers.items()))
        for index, (takes, barriers) in enumerate(invokes)
    ]


def test_values_go_on_through_others() -> None:
    chain = groups(({}, {}), ({"h": 0}, {}), ({"g": 1}, {}), ({}, {}))
    assert ends_before(chain) == [set(), {0}, {0, 1}, set()]
    assert meets(chain) == [{0}, {1}, {2}, {3}]


def test_blocks_that_meet_wait_for_each_other() -> None:
    both = groups(({}, {"a": 2}), ({}, {"a": 2, "b": 2}), ({}, {"b": 2}), ({}, {}))
    check_barriers(both)
    assert meets(both) == [{0, 1, 2}] * 3 + [{3}]


def test_one_that_begins_later_is_not_waited_for() -> None:
    later = groups(({}, {"a": 2}), ({}, {"a": 2}), ({"h": 0}, {"a": 2}))
    check_barriers(later)
    assert meets(later) == [{0, 1}, {0, 1, 2}, {0, 1, 2}]


def test_barriers_that_cannot_fill() -> None:
    with pytest.raises(MisuseError, match=r"waits for 3 blocks, and 2 of the trace refer to it \(invokes 0, 2\)"):
        check_barriers(groups(({}, {"a": 3}), ({}, {}), ({}, {"a": 3})))
    with pytest.raises(MisuseError, match=r"invoke 0 waits at a barrier for invoke 1, .* it takes `h` over"):
        check_barriers(groups(({}, {"a": 2}), ({"h": 0}, {"a": 2})))
