"""Who is left out of an engine step for a prompt that must be computed whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from invivo.vllm_backend.room import left_out


def test_nobody_has_to_go_where_there_is_room() -> None:
    assert left_out(10, 20, [("a", 1), ("b", 9)]) == set()


def test_prompts_in_chunks_go_before_those_that_decode() -> None:
    assert left_out(10, 20, [("a", 1), ("b", 100)]) == {"b"}


def test_the_last_that_decode_go_if_the_prompt_needs_nearly_all() -> None:
    assert left_out(19, 20, [("a", 1), ("b", 1), ("c", 50)]) == {"b", "c"}
    assert left_out(20, 20, [("a", 1), ("b", 1)]) == {"a", "b"}


@given(st.integers(1, 64), st.lists(st.integers(1, 80), max_size=20))
def test_the_prompt_fits_then(prompt: int, tokens: list[int]) -> None:
    running = [(str(index), count) for index, count in enumerate(tokens)]
    out = left_out(prompt, 64, running)
    assert prompt + sum(count for name, count in running if name not in out) <= 64
