"""Sampling arguments: what the engine could not read is refused before it is sent."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from invivo import SamplingError
from invivo.vllm_backend.sampling import plain_params


@pytest.mark.parametrize(
    "given",
    [
        {"n": True},
        {"seed": True},
        {"seed": 2**70},
        {"max_tokens": numpy.int64(2)},
        {"temperature": torch.tensor(0.5)},
        {"stop_token_ids": numpy.array([3])},
        {"logit_bias": {"5": 1.0}},
        {"bad_words": [5]},
        {"structured_outputs": {"regex": 1}},
        {"structured_outputs": {"regex": "a+"}},
        {"extra_args": [1]},
        {"extra_args": {"a": object()}},
    ],
    ids=repr,
)
def test_what_cannot_be_sent_is_refused_by_name(given: dict[str, Any]) -> None:
    """The first of them ended the thread of the engine's process that takes requests in: later ones never came back."""
    (name,) = given
    with pytest.raises(SamplingError, match=name):
        plain_params(given)


@pytest.mark.parametrize(
    "given",
    [
        {"logprobs": True},
        {"stop_token_ids": (3,)},
        {"repetition_penalty": 2, "logit_bias": {5: 1}},
        {"extra_args": {"mine": [1, {"b": 2.0}], "tensor": torch.zeros(2)}},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
    ],
    ids=repr,
)
def test_what_can_be_sent_is_taken(given: dict[str, Any]) -> None:
    plain_params(given)


def test_arguments_that_were_taken_do_not_stand_for_equal_ones_of_other_types() -> None:
    """Scalars are checked once for the same arguments: 1 is equal to True and to 1.0."""
    for _ in range(2):
        assert plain_params({"n": 1, "seed": 1, "temperature": 1}).n == 1
    for given in ({"n": True}, {"n": 1.0}, {"seed": True}):
        with pytest.raises(SamplingError):
            plain_params(given)


def test_each_request_has_parameters_of_its_own() -> None:
    one, other = (plain_params({"max_tokens": 3, "temperature": 0.0}) for _ in range(2))
    assert one == other and one is not other
    one.stop_token_ids.append(5)
    one.all_stop_token_ids.add(5)
    assert not other.stop_token_ids and not other.all_stop_token_ids
