"""Cargo wait for an output of their request, replies for the last one, and nothing stays of those that are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from invivo.vllm_backend.in_band import Cargo, Transit, unpacked


def output(request_id: str, *, finished: bool = False) -> Any:
    return SimpleNamespace(request_id=request_id, finished=finished, ec_transfer_params=None)


def sent(transit: Transit, *outputs: Any) -> list[Cargo]:
    transit.attach(outputs)
    return [unpacked(one) for one in outputs]


def test_streamed_values_go_with_the_next_output_and_the_reply_with_the_last() -> None:
    transit = Transit()
    transit.add({"a": Cargo([b"1"], b"reply"), "b": Cargo([b"2"], None)})
    assert sent(transit, output("a"), output("c")) == [([b"1"], None), ([], None)]
    transit.add({"a": Cargo([b"3"], None)})
    assert sent(transit, output("b"), output("a"), output("a", finished=True)) == [
        ([b"2"], None),
        ([b"3"], None),
        ([], b"reply"),
    ]


def test_a_newer_reply_takes_the_place_of_an_older_one() -> None:
    transit = Transit()
    transit.add({"a": Cargo([], b"well")})
    transit.add({"a": Cargo([b"1"], b"failed")})
    assert sent(transit, output("a", finished=True)) == [([b"1"], b"failed")]


def test_requests_that_are_gone_are_forgotten() -> None:
    transit = Transit()
    transit.add({"a": Cargo([b"1"], None), "b": Cargo([], b"reply")})
    transit.keep({"b"})
    assert sent(transit, output("a", finished=True), output("b", finished=True)) == [([], None), ([], b"reply")]


def test_what_others_put_on_an_output_stays() -> None:
    transit, one = Transit(), output("a")
    one.ec_transfer_params = {"theirs": 1}
    transit.add({"a": Cargo([b"1"], None)})
    assert sent(transit, one) == [([b"1"], None)]
    assert one.ec_transfer_params == {"theirs": 1}
