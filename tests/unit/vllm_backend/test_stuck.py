"""When an engine stands still for good; the clock is a stand-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from invivo.vllm_backend import stuck
from invivo.vllm_backend.stuck import PATIENCE, Stuck


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time."""
    now = [0.0]
    monkeypatch.setattr(stuck, "monotonic", lambda: now[0])
    return lambda time: now.__setitem__(0, time)


def test_requests_at_a_barrier_end_when_nothing_has_moved_for_long(clock: Callable[[float], None]) -> None:
    standing = Stuck()
    assert not standing.see({"a"}, moving=False)
    clock(PATIENCE - 0.1)
    assert not standing.see({"a"}, moving=False)
    clock(PATIENCE)
    assert standing.see({"a"}, moving=False) == {"a"}


@pytest.mark.parametrize(("held", "moving"), [({"a"}, True), (set[str](), False)])
def test_what_moves_starts_the_time_anew(clock: Callable[[float], None], held: set[str], moving: bool) -> None:
    """A grammar that is being compiled counts as moving, however long it takes."""
    standing = Stuck()
    standing.see({"a"}, moving=False)
    clock(PATIENCE)
    assert not standing.see(held, moving)
    clock(PATIENCE + 1)
    assert not standing.see({"a"}, moving=False)
