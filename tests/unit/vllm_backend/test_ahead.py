"""Which requests run ahead of their last token, and what their blocks are spared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from vllm import SamplingParams

from invivo.tracer.block import Group
from invivo.vllm_backend.ahead import Ahead, runs_ahead, stop_tokens

ALONE = Group("trace", 0, 2, (), (), ())
MEETING = Group("trace", 0, 2, (), (), (("meet", 2),))


def with_eos(**given: Any) -> SamplingParams:
    params = SamplingParams(**given)
    params.update_from_generation_config({}, 2)
    return params


def test_the_tokens_that_end_a_request() -> None:
    assert stop_tokens(with_eos(stop_token_ids=[7])) == {2, 7}
    assert stop_tokens(with_eos(ignore_eos=True, stop_token_ids=[7])) == {7}
    assert stop_tokens(with_eos(ignore_eos=True)) == frozenset()


@pytest.mark.parametrize("group", [None, ALONE])
def test_one_that_no_token_can_end_runs_ahead_and_so_does_one_that_meets_no_module(group: Group | None) -> None:
    assert runs_ahead(with_eos(ignore_eos=True), group, no_module=False)
    assert runs_ahead(with_eos(), group, no_module=True)
    assert not runs_ahead(with_eos(), group, no_module=False)


def test_one_that_may_be_held_or_ended_by_something_else_does_not() -> None:
    repetition = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
    structured = {"regex": "a+"}
    assert not runs_ahead(with_eos(ignore_eos=True), MEETING, no_module=True)
    for params in (
        SamplingParams.from_optional(ignore_eos=True, repetition_detection=repetition),
        SamplingParams.from_optional(ignore_eos=True, structured_outputs=structured),
    ):
        assert not runs_ahead(params, None, no_module=True)


class Outputs:
    """Counts how often somebody waits."""

    def __init__(self) -> None:
        self.waits = 0

    def __call__(self, output: Any) -> Mapping[str, int]:
        self.waits += 1
        found: Mapping[str, int] = output
        return found


def test_only_where_a_token_may_have_ended_a_request_is_it_waited_for() -> None:
    outputs = Outputs()
    ahead = Ahead(outputs)
    ahead.add("a", None, frozenset({7}), no_module=True)
    ahead.add("b", None, frozenset(), no_module=True)
    assert ahead.over(["a", "b"]) == []
    ahead.sampled({"a": 7, "b": 7})
    assert ahead.over(["b", "plain"]) == [] and outputs.waits == 0
    assert ahead.over(["a", "b", "plain"]) == ["a"] and outputs.waits == 1
    ahead.sampled({"a": 6, "b": 7})
    assert ahead.over(["a"]) == []
    ahead.sampled({"b": 7})  # "a" was not computed in that step
    assert ahead.over(["a"]) == []


def test_blocks_without_modules_are_late_if_all_of_their_trace_are() -> None:
    ahead = Ahead(Outputs())
    running = list("abcdef")
    ahead.add("a", None, frozenset(), no_module=True)
    ahead.add("b", None, frozenset(), no_module=False)
    ahead.add("c", Group("one", 0, 2, (), (), ()), frozenset(), no_module=True)
    ahead.add("d", Group("one", 1, 2, (), (), ()), frozenset(), no_module=False)
    ahead.add("e", Group("two", 0, 2, (), (), ()), frozenset(), no_module=True)
    ahead.add("f", Group("two", 1, 2, (("x", 0),), (), ()), frozenset(), no_module=True)
    assert ahead.late(running, [*running, "plain"]) == ["a"]
    assert ahead.late(running, ["a", "c", "e"]) == ["a", "c", "e"]


def test_those_that_have_gone_are_forgotten() -> None:
    ahead = Ahead(Outputs())
    for name in "ab":
        ahead.add(name, None, frozenset({7}), no_module=True)
    assert ahead.late(["b"], ["a", "b"]) == ["b"]
    assert ahead.late([], []) == [] and ahead._output is None and not ahead._blocks
