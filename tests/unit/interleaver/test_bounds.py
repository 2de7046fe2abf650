"""Whole numbers that a model cannot look up, at a port of a module."""

from __future__ import annotations

import pytest
import torch

from invivo.envoy.address import INPUT, port_at
from invivo.envoy.errors import WriteError
from invivo.interleaver.bounds import Bounds, tables
from invivo.interleaver.values import Held, Passing, copies


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 4)
        self.layer = torch.nn.Linear(4, 4)


BOUNDS = Bounds(tables(Model()), 16)
FLOATS, BOOLS = torch.full((2,), 1e9), torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(("address", "limit"), [("embed", 100), ("layer", 16), ("", 100)])
def test_numbers_are_within_the_table(address: str, limit: int) -> None:
    port = port_at(address, INPUT)
    BOUNDS.check(port, [None, FLOATS, BOOLS, torch.tensor([0, limit - 1])])
    for wrong in (-1, limit):
        with pytest.raises(WriteError, match=rf"from 0 to {limit - 1} here.* has put 0 to {wrong}|{wrong} to 0 there"):
            BOUNDS.check(port, [torch.tensor([0, wrong])])


def test_the_numbers_after_the_ids_are_positions() -> None:
    BOUNDS.check(port_at("", INPUT), [torch.tensor([99]), torch.tensor([15])])
    with pytest.raises(WriteError, match="from 0 to 15 here"):
        BOUNDS.check(port_at("", INPUT), [torch.tensor([99]), FLOATS, torch.tensor([16])])


def test_a_block_that_catches_the_error_goes_on_without_the_edit() -> None:
    port, ids = port_at("embed", INPUT), torch.tensor([1, 2])
    (copy,), versions = copies(ids, [None], port)
    held = Held(copy, versions, None, Passing(ids, port))
    copy.fill_(1000)  # type: ignore[attr-defined]  # it is a tensor
    with pytest.raises(WriteError, match="has put 1000 to 1000 there"):
        held.settle(BOUNDS)
    held.settle(BOUNDS)
    assert held.changed is None
