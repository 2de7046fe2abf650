"""Rows of a flat batch, on hand-made engine steps and on random ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invivo.envoy.errors import PreemptedError, UnsupportedError
from invivo.interleaver.windows import Share, Window, due_rows, shares, step_of


def test_a_mixed_step() -> None:
    """A decode, a whole prompt, the second chunk of a prompt; the tensors are padded to 16 rows."""
    found = shares(["d", "p", "c"], [0, 1, 8, 12], [10, 0, 4], [7, 7, 9], 16)
    assert found["d"].rows == Window(0, 1, 16)
    assert found["p"].rows == Window(1, 7, 16)
    assert found["c"].rows == Window(8, 4, 16)
    assert [share.last for share in found.values()] == [Window(0, 1, 3), Window(1, 1, 3), Window(2, 1, 3)]
    assert [share.step for share in found.values()] == [4, 0, None]
    assert "split" in found["c"].reason


@pytest.mark.parametrize(
    ("computed", "count", "prompt", "step"),
    [(0, 5, 5, 0), (0, 1, 1, 0), (5, 1, 5, 1), (12, 1, 5, 8), (0, 3, 5, None), (3, 2, 5, None), (0, 9, 5, None)],
)
def test_step_of_rows(computed: int, count: int, prompt: int, step: int | None) -> None:
    assert step_of(computed, count, prompt)[0] == step


def test_why_rows_are_not_a_step() -> None:
    assert "its prompt of 5 tokens was split" in step_of(0, 3, 5)[1]
    assert "as after a preemption" in step_of(0, 9, 5)[1]
    assert "as after a preemption" in step_of(5, 2, 5)[1]
    assert "as after a preemption" in step_of(2, 5, 5)[1]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=8), st.integers(0, 8))
def test_every_row_belongs_to_one_request(requests: list[tuple[int, int]], padding: int) -> None:
    """Prompts at step 0 and decodes at any step, in any order: the windows tile the batch."""
    counts = [prompt if done == 0 else 1 for prompt, done in requests]
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    computed = [0 if done == 0 else prompt + done - 1 for prompt, done in requests]
    names = [str(index) for index in range(len(requests))]
    found = shares(names, starts, computed, [prompt for prompt, _ in requests], starts[-1] + padding)
    rows = [row for share in found.values() if share.rows for row in range(share.rows.start, sum(share.rows[:2]))]
    assert rows == list(range(starts[-1]))
    assert [share.step for share in found.values()] == [done for _, done in requests]
    assert [share.last.start for share in found.values() if share.last] == list(range(len(requests)))


def _share(computed: int, count: int, prompt: int) -> Share:
    return shares(["r"], [0, count], [computed], [prompt], count)["r"]


def test_what_a_block_sees_of_rows_that_are_not_its_step() -> None:
    """The end of a prompt whose beginning was shared; steps that are computed once more after a preemption."""
    end = _share(4, 3, 7)
    assert due_rows(end, 0, partial_prompt=True, edited=False) == end
    again = due_rows(_share(0, 9, 7), 2, partial_prompt=False, edited=False)
    assert again is not None and again.rows == Window(8, 1, 9) and again.step == 2
    assert due_rows(_share(0, 7, 7), 2, partial_prompt=False, edited=False) is None


@pytest.mark.parametrize(
    ("rows", "expected", "partial", "edited", "error"),
    [
        ((0, 9, 7), 2, False, True, PreemptedError),
        ((4, 3, 7), 0, False, False, UnsupportedError),
        ((0, 3, 7), 0, True, False, UnsupportedError),
        ((8, 1, 7), 1, False, False, UnsupportedError),
    ],
)
def test_rows_that_a_block_cannot_go_on_with(
    rows: tuple[int, int, int], expected: int, partial: bool, edited: bool, error: type[Exception]
) -> None:
    with pytest.raises(error, match="this trace had to end"):
        due_rows(_share(*rows), expected, partial_prompt=partial, edited=edited)


def test_no_torch_is_needed() -> None:
    code = "import sys, invivo.interleaver.windows; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
