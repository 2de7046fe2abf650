"""Limits are checked where they are given, and sizes of saves counted once each."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from invivo import Local, MisuseError
from invivo.interleaver.limits import Limits, limits
from invivo.interleaver.mediator import Saved
from invivo.interleaver.memory import shown
from invivo.interleaver.meter import Meter, fitting, size_of
from invivo.vllm_backend.settings import KEY, LIMITS, limits_of, settings

KIB = torch.zeros(256)


def saved(*values: object) -> list[Saved]:
    return [Saved(value, (), 1) for value in values]


@pytest.mark.parametrize("name", ["time_limit", "memory_limit", "save_limit"])
@pytest.mark.parametrize("value", [0, -1, "30", True, float("inf"), float("nan"), [1]])
def test_a_limit_that_is_no_positive_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(MisuseError, match=rf"`{name}=.*positive number .* or None for no limit"):
        Local(torch.nn.Identity(), **{name: value})


def test_none_is_no_limit() -> None:
    assert not limits(None, None, None).any
    assert limits(1, None, None).any
    assert limits(30.0, 0.5, 4 << 30) == Limits(30.0, 0.5, 4 << 30)


def test_each_storage_counts_once_and_whole() -> None:
    array = np.zeros(1024, np.uint8)
    assert size_of([KIB[:3], KIB[3:]]) == 1024
    assert size_of([{"a": (KIB, [KIB.clone()])}, {"b": 3}, "four", b"five"]) == 2048 + 8
    assert size_of([array[:5], array[5:]]) == 1024
    assert size_of([torch.zeros(10**9, device="meta"), torch.zeros(2).to_sparse(), None, object()]) == 0


def test_what_sends_more_than_it_holds_counts_as_that() -> None:
    """A row that is expanded to a matrix took an engine all of its memory, when it was packed."""
    assert size_of([torch.zeros(1).expand(1000, 256)]) == 1000 * 1024
    assert size_of([np.broadcast_to(np.zeros(1, np.uint8), (1000, 1024))]) == 1000 * 1024
    assert size_of([[KIB.view(16, 16) for _ in range(10)]]) == 10 * 1024
    assert size_of([[KIB] * 10, KIB]) == 1024  # one object is sent once


def test_a_container_in_itself_ends() -> None:
    loop: list[object] = [KIB]
    loop.append(loop)
    assert size_of([loop]) == 1024


@pytest.mark.parametrize("make", [list, deque, dict])
def test_what_is_appended_is_counted_and_nothing_else_is_looked_at(make: Any) -> None:
    meter, container = Meter(), make()
    entries = saved(container)
    for number in range(300):
        value = torch.zeros(256)
        if isinstance(container, dict):
            container[number] = value
        else:
            container.append(value)
        assert meter.update(entries, 200 << 10) == (number >= 200)
        if number < 200:
            assert meter.total == (number + 1) * 1024
            assert meter._items == number + 2  # the container and each value, once


def test_what_grows_inside_of_others_is_found_in_time() -> None:
    meter, inner = Meter(), {number: list[torch.Tensor]() for number in range(3)}
    entries = saved(inner)
    for number in range(400):
        inner[number % 3].append(torch.zeros(256))
        if meter.update(entries, 100 << 10):
            break
    assert 100 <= number < 210


def test_replacing_is_not_growing() -> None:
    meter, window = Meter(), deque[torch.Tensor](maxlen=4)
    entries = saved(window)
    for _ in range(100):
        window.append(torch.zeros(256))
        assert not meter.update(entries, 8 << 10)


def test_what_fits_is_kept_in_order() -> None:
    values = {"a": KIB, "big": torch.zeros(4096), "same": KIB, "b": KIB.clone()}
    assert list(fitting(values, 2048)) == ["a", "same", "b"]
    assert list(fitting(values, None)) == list(values)


def test_sizes_as_people_read_them() -> None:
    assert [shown(size) for size in (5, 2048, 3 << 19, 5 << 30)] == ["5 bytes", "2.0 KiB", "1.5 MiB", "5.0 GiB"]


def test_limits_travel_in_the_settings_of_an_engine() -> None:
    given = Limits(time=1.5, memory=1 << 30, saves=None)
    through_json = json.loads(json.dumps({KEY: settings(given)}))
    assert limits_of(through_json) == given
    assert limits_of({KEY: {}}) == limits_of({KEY: True}) == LIMITS  # as `vllm serve` may be given them
