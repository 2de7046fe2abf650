"""Which changes of captured objects are warned about."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest

from invivo.interleaver.lost import Snapshot


class Thing:
    def __init__(self) -> None:
        self.log = logging.getLogger("a.b")
        self.items: list[int] = []

    @cached_property
    def total(self) -> list[int]:
        return [1]


class Sub(Thing):
    pass


ADAPTER = logging.LoggerAdapter(logging.getLogger("a.d"), {})


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (logging.getLogger("a.c"), lambda log: log.error("x")),
        (logging.getLogger(), lambda log: log.debug("x")),
        (ADAPTER, lambda log: log.error("x")),
        ([ADAPTER], lambda logs: logs[0].error("x")),
        (Thing(), lambda thing: thing.log.info("x")),
        (Sub(), lambda thing: thing.total),
    ],
)
def test_what_changes_by_itself(value: object, use: Callable[[Any], object]) -> None:
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]
    before = Snapshot({"name": value})
    use(value)
    assert before.lost([]) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda thing: thing.items.append(1),
        lambda thing: setattr(thing, "log", None),
        lambda thing: setattr(thing, "other", 1),
    ],
)
def test_a_change_of_an_object(change: Callable[[Any], object]) -> None:
    thing = Sub()
    before = Snapshot({"thing": thing})
    change(thing)
    assert len(before.lost([])) == 1
