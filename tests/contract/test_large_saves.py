"""Saves of 100 MB: they come home as they are, and their memory goes with the last tensor, on every side."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from support.contract import PROMPT, assert_serves, prompt_ids, same, stream
from support.processes import descendants

TIMES = 5000
"""[9, 576] float32 so many times are 104 MB."""

ONE = 9 * 576 * 4 * TIMES / 2**20
"""The same in MiB."""


def large_trace(model: Any) -> torch.Tensor:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        found = {"hidden": stream(model.model.layers[5]).repeat(TIMES, 1)}.save()
    return found["hidden"]


def test_100_mb_equal_the_reference(model: Any, reference: Any) -> None:
    found = large_trace(model)
    expected = reference.run(prompt_ids(model), 1).steps[0].output("model.layers.5")
    assert found.shape == (9 * TIMES, 576)
    assert same(found, expected.repeat(TIMES, 1))
    found += 1  # it is the caller's own
    assert not found.is_inference()


def test_views_of_one_tensor_come_home_as_tensors_of_their_own(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        hidden = stream(model.model.layers[5]).repeat(300, 1).save()
        last = hidden[-9:].save()
        pair = [hidden, last].save()
    assert pair[0] is hidden
    assert torch.equal(hidden[-9:], last)
    hidden.zero_()
    assert last.abs().max() > 0
    last.zero_()


def test_saves_before_an_error_come_home(model: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            hidden = stream(model.model.layers[5]).repeat(TIMES, 1).save()
            1 / 0
    assert caught.value.saves["hidden"].shape == (9 * TIMES, 576)


@pytest.mark.engine
def test_memory_goes_back_on_every_side(smollm2: Any) -> None:
    """Pages of shared files are counted by themselves: the rest of a process's memory has its own ups and downs."""
    for _ in range(3):
        large_trace(smollm2)
    processes = [psutil.Process(), *descendants(psutil.Process().pid)]
    before = shared(processes)
    kept = [large_trace(smollm2) for _ in range(5)]
    assert all(hidden.isfinite().all() for hidden in kept)  # pages count once they have been touched
    assert shared(processes)[0] - before[0] > 4 * ONE
    del kept
    gc.collect()
    deadline = time.monotonic() + 40  # what a GPU copies to is kept for some seconds
    while any(now - earlier > 1 for now, earlier in zip(shared(processes), before, strict=True)):
        assert time.monotonic() < deadline, (before, shared(processes))
        time.sleep(0.1)
    assert_serves(smollm2)


def shared(processes: list[psutil.Process]) -> list[float]:
    """Resident pages of shared files without a name in each, in MiB."""
    found = []
    for process in processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found.append(int(status.partition("RssShmem:")[2].split()[0]) / 2**10)
    return found
