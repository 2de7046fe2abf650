"""Values are copied when they are streamed, under names of their own, step by step."""

from __future__ import annotations

import pytest
import torch

from invivo import SaveError
from invivo.envoy.address import OUTPUT, port_at
from invivo.interleaver.streamed import Streamed
from invivo.tracer.results import from_bytes


def taken(streamed: Streamed) -> dict[str, object]:
    return {name: value for data in streamed.take() for name, value in from_bytes(data).items()}


def test_names() -> None:
    streamed, port = Streamed(), port_at("layers.3", OUTPUT)
    for number in range(3):
        streamed.add(number, ("h",), port)
    streamed.add("a and b", ("a", "b"), port)
    streamed.add("at a port", (), port)
    streamed.add("at none", (), None)
    streamed.add("at none again", (), None)
    assert taken(streamed) == {
        "h": 0,
        "h[1]": 1,
        "h[2]": 2,
        "a": "a and b",
        "b": "a and b",
        "layers.3.output": "at a port",
        "value": "at none",
        "value[1]": "at none again",
    }
    assert taken(streamed) == {}
    streamed.add(5, ("h",), port)
    assert taken(streamed) == {"h": 5}


def test_a_value_is_what_it_was() -> None:
    streamed, tensor = Streamed(), torch.ones(3)
    streamed.add(tensor, ("h",), None)
    tensor[:] = 2
    found = taken(streamed)["h"]
    assert isinstance(found, torch.Tensor) and torch.equal(found, torch.ones(3))


def test_a_value_that_cannot_be_sent() -> None:
    streamed = Streamed()
    with pytest.raises(SaveError, match="`h` cannot be saved"):
        streamed.add(object(), ("h",), None)
    assert taken(streamed) == {}
