"""Blocks that look at some tensors of a tuple only, of which nothing else is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from invivo.envoy.address import OUTPUT, port_at
from invivo.envoy.errors import UnsupportedError, WriteError
from invivo.interleaver.holding import HeldItems, Items
from invivo.interleaver.values import Passing, put_rows
from invivo.interleaver.windows import Window

X = port_at("x", OUTPUT)
WINDOWS = [Window(0, 2, 5), Window(2, 3, 5)]


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def hold(value: tuple[torch.Tensor, ...], windows: Sequence[Window | None], asks: Sequence[int]) -> list[HeldItems]:
    items, passing = Items(value, windows, X, asks), Passing(value, X)
    return [HeldItems(items, place, window, passing) for place, window in enumerate(windows)]


def made(held: HeldItems) -> set[int]:
    """The items that were copied."""
    return {*held._items._made}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return numbers(5, 3), numbers(5, 3) + 100


@pytest.mark.parametrize("windows", [WINDOWS, WINDOWS[1:], [None]], ids=["two blocks", "one block", "all rows"])
def test_only_what_is_looked_at_is_copied(windows: list[Window | None]) -> None:
    value = pair()
    with torch.inference_mode():
        held = hold(value, windows, [1])
    for one, window in zip(held, windows, strict=True):
        rows = value[1][window.start : window.start + window.length] if window is not None else value[1]
        found: Any = one.item(1)
        assert torch.equal(found, rows)
        assert found.untyped_storage().nbytes() == rows.numel() * 4, "no rows of others are in reach"
        assert one.item(1) is found
        one.settle()
        assert one.changed is None
        assert made(one) == {1}


def test_more_of_it_is_there_when_it_is_looked_at() -> None:
    value = pair()
    one, other = hold(value, WINDOWS, [0])
    first: Any = one.item(0)
    second: Any = one.item(1)
    assert torch.equal(second, value[1][:2])
    whole: Any = one.value
    assert whole[0] is first and whole[1] is second
    assert one.item(1) is second and one.value is whole
    assert torch.equal(other.value[1], value[1][2:])  # type: ignore[index]
    for held in (one, other):
        held.settle()
        assert held.changed is None


@pytest.mark.parametrize("looks", ["no more", "at all of it", "at the other one"])
@pytest.mark.parametrize("windows", [WINDOWS, WINDOWS[1:]], ids=["two blocks", "one block"])
def test_edits_go_back_to_their_places(windows: list[Window | None], looks: str) -> None:
    value = pair()
    held = hold(value, windows, [0])
    one = held[-1]
    one.item(0).mul_(-1)  # type: ignore[attr-defined]
    _ = {"no more": lambda: None, "at all of it": lambda: one.value, "at the other one": lambda: one.item(1)}[looks]()
    for each in held:
        each.settle()
    assert one.changed is not None and one.changed[1] is None
    assert all(each.changed is None for each in held[:-1])
    after: Any = put_rows(value, [(one.changed, WINDOWS[1])], X)
    assert torch.equal(after[0], torch.cat([value[0][:2], -value[0][2:]]))
    assert after[1] is value[1]


def test_an_assignment_takes_the_place_of_all() -> None:
    value = pair()
    (one,) = hold(value, WINDOWS[1:], [0])
    given = torch.zeros(3, 3), torch.ones(3, 3)
    one.assign(given, "x")
    assert one.item(1) is given[1]
    one.settle()
    after: Any = put_rows(value, [(one.changed or [], WINDOWS[1])], X)
    assert torch.equal(after[0][2:], given[0]) and torch.equal(after[1][2:], given[1])


@pytest.mark.parametrize("change", [lambda t: t.resize_(1, 3), lambda t: t.unsqueeze_(0), lambda t: t.t_()])
def test_a_change_that_does_not_fit_is_refused_and_forgotten(change: Callable[[torch.Tensor], object]) -> None:
    (one,) = hold((numbers(5, 2), numbers(5, 2)), WINDOWS[1:], [0])
    change(one.item(0))  # type: ignore[arg-type]
    with pytest.raises(WriteError, match="cannot go on with"):
        one.settle()
    one.settle()
    assert one.changed is None


def test_items_that_are_not_there_are_errors_of_python() -> None:
    (one,) = hold(pair(), WINDOWS[1:], [7])
    assert made(one) == set()
    with pytest.raises(IndexError, match="tuple index out of range"):
        one.item(7)


def test_rows_must_be_told_of_what_is_looked_at_only() -> None:
    value = numbers(5, 3), numbers(4, 3)
    (one,) = hold(value, WINDOWS[1:], [0])
    assert torch.equal(one.item(0), value[0][2:])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="cannot be told"):
        one.item(1)
    one.item(0).mul_(-1)  # type: ignore[attr-defined]
    one.settle()
    after: Any = put_rows(value, [(one.changed or [], WINDOWS[1])], X)
    assert torch.equal(after[0][2:], -value[0][2:]) and after[1] is value[1]
    with pytest.raises(UnsupportedError, match="cannot be told"):
        hold(value, WINDOWS, [1])


class _Doubles(TorchDispatchMode):
    """A mode that changes what is made in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {}) * 2


@pytest.mark.parametrize("windows", [WINDOWS, WINDOWS[1:]], ids=["two blocks", "one block"])
def test_modes_of_a_block_do_not_reach_the_copies(windows: list[Window | None]) -> None:
    value = pair()
    held = hold(value, windows, [0])
    with _Doubles():
        held[-1].item(1)
    assert torch.equal(held[-1].item(1), value[1][2:])  # type: ignore[arg-type]

    held = hold(value, windows, [0])
    seen: list[object] = []

    def transformed(x: torch.Tensor) -> torch.Tensor:
        seen.append(held[-1].item(1))
        return x.sum()

    torch.func.grad(transformed)(torch.ones(3))
    torch.func.vmap(transformed)(torch.ones(2, 3))
    assert type(seen[0]) is torch.Tensor and torch.equal(seen[0], value[1][2:])

    held = hold(value, windows, [0])
    with torch.inference_mode():
        inside: Any = held[-1].item(1)
    assert not inside.is_inference()
