"""Copies of rows, edits, and how they get back."""

from __future__ import annotations

from collections import namedtuple
from typing import cast

import pytest
import torch

from invivo.envoy.address import OUTPUT, port_at
from invivo.envoy.errors import UnsupportedError, WriteError
from invivo.interleaver.cuts import CUTS
from invivo.interleaver.fit import describe
from invivo.interleaver.structure import map_tensors, tensors_of
from invivo.interleaver.values import Held, Passing, copies, copy_of, put_rows
from invivo.interleaver.windows import Window

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  (what models return)
WINDOW = Window(1, 2, 4)
X = port_at("x", OUTPUT)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def copy_rows(value: object, window: Window | None) -> object:
    """The copy of one request."""
    (copy,), _ = copies(value, [window], X)
    return copy


def hold(value: object, window: Window | None = None, limit: int | None = None, fixed: str | None = None) -> Held:
    """What the block of one request holds."""
    (copy,), versions = copies(value, [window], X)
    return Held(copy, versions, window, Passing(value, X, limit, fixed))


def changes_of(held: Held) -> list[torch.Tensor | None] | None:
    """What it has changed when it goes on."""
    held.settle()
    return held.changed


def test_copies_keep_the_structure() -> None:
    value = (numbers(4, 3), [numbers(4), None], {"a": numbers(4, 1)}, "text")
    copy = cast("tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor], str]", copy_rows(value, WINDOW))
    assert torch.equal(copy[0], value[0][1:3])
    assert torch.equal(copy[1][0], value[1][0][1:3])  # type: ignore[index]
    assert torch.equal(copy[2]["a"], value[2]["a"][1:3])
    assert copy[1][1] is None and copy[3] == "text"
    assert isinstance(copy_rows(Pair(numbers(4), 1), WINDOW), Pair)


def test_rows_may_follow_a_leading_one() -> None:
    copy = copy_rows(numbers(1, 4, 3), WINDOW)
    assert torch.equal(cast("torch.Tensor", copy), numbers(1, 4, 3)[:, 1:3])


@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (2, 4)])
def test_rows_that_cannot_be_told_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"x\.output holds a tensor of shape .* the step has 4 rows"):
        copy_rows(numbers(*shape), WINDOW)


def test_an_untouched_copy_has_no_changes() -> None:
    with torch.inference_mode():
        held = hold((numbers(4, 3), numbers(4)), WINDOW)
        torch.add(cast("tuple[torch.Tensor, ...]", held.value)[0], 1)
    assert changes_of(held) is None


def test_edits_in_place_reach_only_the_window_and_only_a_new_tensor() -> None:
    with torch.inference_mode():
        value = (numbers(4, 3), numbers(4))
        held = hold(value, WINDOW)
        cast("tuple[torch.Tensor, ...]", held.value)[0][-1] += 100  # through a view
        changes = changes_of(held)
        assert changes is not None and changes[1] is None
        after = cast("tuple[torch.Tensor, torch.Tensor]", put_rows(value, [(changes, WINDOW)], X))
    expected = numbers(4, 3)
    expected[2] += 100
    assert torch.equal(after[0], expected)
    assert torch.equal(value[0], numbers(4, 3)), "the model's own tensor is not written"
    assert after[1] is value[1]


SPLITS = {
    "all rows": ([Window(0, 2, 5), Window(2, 1, 5), Window(3, 2, 5)], True),
    "in another order": ([Window(3, 2, 5), Window(0, 2, 5), Window(2, 1, 5)], True),
    "rows of others between and behind": ([Window(0, 2, 6), Window(3, 2, 6)], True),
    "mostly rows of others": ([Window(2, 1, 9), Window(5, 1, 9)], False),
    "several rows and one, mostly those of others": ([Window(2, 2, 9), Window(5, 1, 9)], False),
}


@pytest.mark.parametrize("form", ["tensor", "tuple", "in a list", "gradient", "transposed", "behind a leading one"])
@pytest.mark.parametrize("window", [None, Window(2, 3, 6), Window(4, 1, 6)])
def test_one_request_gets_the_same_by_itself(form: str, window: Window | None) -> None:
    plain = numbers(6, 3)
    forms = {
        "tuple": (plain, plain + 100),
        "in a list": [plain],
        "gradient": plain.clone().requires_grad_(),
        "transposed": numbers(3, 6).T,
        "behind a leading one": plain[None],
    }
    value = forms.get(form, plain)
    with torch.inference_mode():
        (many,), expected = copies(value, [window], X)
        one, versions = copy_of(value, window, X)
        assert type(one) is type(many) and versions == expected
        for mine, other in zip(tensors_of(one), tensors_of(many), strict=True):
            assert torch.equal(mine, other) and not mine.requires_grad
            assert mine.untyped_storage().nbytes() == mine.nbytes, "no rows of others are in reach"
        if window is not None:
            whole = tensors_of(value)[0].detach()
            rows = (whole[0] if form == "behind a leading one" else whole)[window.start :][: window.length]
            assert torch.equal(tensors_of(one)[0].reshape(rows.shape), rows)
        held = Held(one, versions, window, Passing(value, X))
        assert changes_of(held) is None
        tensors_of(one)[0].zero_()
        assert changes_of(held) is not None


@pytest.mark.parametrize(("windows", "at_once"), SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("form", ["tensor", "tuple", "behind a leading one", "transposed", "in a list"])
def test_several_requests_get_copies_of_their_own_rows(form: str, windows: list[Window], at_once: bool) -> None:
    total = windows[0].total
    assert (CUTS.at(windows) is not None) == at_once
    with torch.inference_mode():
        plain = numbers(total, 3)
        value: object = {
            "tensor": plain,
            "tuple": (plain, None, plain + 100),
            "behind a leading one": plain[None],
            "transposed": numbers(3, total).T,
            "in a list": [plain],
        }[form]
        made, versions = copies(value, windows, X)
        passing = Passing(value, X)
        held = [Held(copy, versions, window, passing) for copy, window in zip(made, windows, strict=True)]
        before = tensors_of(value)
        for copy, (start, length, _) in zip(made, windows, strict=True):
            for mine, whole in zip(tensors_of(copy), before, strict=True):
                rows = whole[:, start : start + length] if form == "behind a leading one" else whole[start:][:length]
                assert torch.equal(mine, rows)
                assert mine.untyped_storage().nbytes() == rows.numel() * 4, "no rows of others are in reach"
        assert all(changes_of(one) is None for one in held)
        for index, copy in enumerate(made):
            tensors_of(copy)[0].fill_(-index)
        changes = [(changed, window) for one, window in zip(held, windows, strict=True) if (changed := changes_of(one))]
        after = tensors_of(put_rows(value, changes, X))
    expected = before[0].clone()
    for index, (start, length, _) in enumerate(windows):
        (expected[0] if form == "behind a leading one" else expected)[start : start + length] = -index
    assert torch.equal(after[0], expected)
    assert after[0].stride() == before[0].stride()
    assert torch.equal(tensors_of(value)[0], before[0]) and after[1:] == before[1:]


def test_what_was_assigned_is_copied_for_the_model() -> None:
    held = hold(numbers(4, 3))
    mine = torch.zeros(4, 3)
    held.assign(mine, "x.output")
    after = cast("torch.Tensor", put_rows(numbers(4, 3), [(changes_of(held) or [], None)], X))
    mine += 1
    assert torch.equal(after, torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3, 3), r"x takes float32 \[2, 3\], and got float32 \[3, 3\]: the shape must be the same"),
        (torch.zeros(2, 3, dtype=torch.float64), "the dtype must be the same"),
        (torch.zeros(2, dtype=torch.int64), "the shape and dtype must be the same"),
        (torch.zeros(2, 3, device="meta"), "on meta: the device must be the same"),
        (0, r"and got int\. To fill it with one value, write `x\[:\] = \.\.\.`"),
        (None, "and got NoneType"),
    ],
)
def test_what_does_not_fit_is_refused(given: object, message: str) -> None:
    with pytest.raises(WriteError, match=message):
        hold(torch.zeros(2, 3)).assign(given, "x")


def test_structures_must_fit_too() -> None:
    held = hold((torch.zeros(2), None, {"a": torch.zeros(2)}))
    for given, message in (
        (torch.zeros(2), "takes a tuple of 3 values"),
        ((torch.zeros(2), None), "takes a tuple of 3 values, and got tuple"),
        ((torch.zeros(2), 1, {"a": torch.zeros(2)}), r"x\[1\] holds None, which is not a tensor"),
        ((torch.zeros(2), None, {"b": torch.zeros(2)}), r"x\[2\] takes a dict with the keys \['a'\]"),
        ((torch.zeros(2), None, {"a": torch.zeros(1)}), r"x\[2\]\['a'\] takes float32 \[2\]"),
    ):
        with pytest.raises(WriteError, match=message):
            held.assign(given, "x")


def test_containers_changed_in_place_are_checked() -> None:
    held = hold([torch.zeros(2), torch.zeros(2)])
    cast("list[torch.Tensor]", held.value).pop()
    with pytest.raises(WriteError, match="what a port holds was changed"):
        held.settle()


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "assigned", "list that was cut"])
def test_a_block_that_catches_the_error_goes_on_without_the_edit(form: str) -> None:
    value: object = {"tensor": numbers(2), "assigned": numbers(2), "tuple": (numbers(2), numbers(3))}.get(
        form, [numbers(2), numbers(3)]
    )
    held = hold(value)
    if form == "assigned":
        held.assign(torch.zeros(2), "x")
    if form == "list that was cut":
        cast("list[torch.Tensor]", held.value).pop()
    else:
        tensors_of(held.value)[0].resize_(7)
    with pytest.raises(WriteError, match="what a port holds was changed"):
        held.settle()
    held.settle()
    assert held.changed is None
    if form != "list that was cut":
        return
    assert len(cast("list[torch.Tensor]", held.value)) == 2, "it is there again"
    cast("list[torch.Tensor]", held.value)[1][:] = 5
    assert changes_of(held) is not None, "an edit that comes later counts"


def test_a_token_can_be_chosen_after_one_that_was_refused() -> None:
    held = hold(torch.tensor([3]), limit=10)
    token = cast("torch.Tensor", held.value)
    token[0] = 10
    with pytest.raises(WriteError, match="token ids from 0 to 9"):
        held.settle()
    assert changes_of(held) is None
    token[0] = 4
    assert changes_of(held) == [token]


def test_token_ids_have_a_limit() -> None:
    held = hold(torch.tensor([3]), limit=10)
    held.settle()
    cast("torch.Tensor", held.value)[0] = 10
    with pytest.raises(WriteError, match="token ids from 0 to 9"):
        held.settle()


def test_mapping_and_listing() -> None:
    value = {"a": [torch.ones(1)], "b": (torch.ones(2), 3)}
    assert [tensor.numel() for tensor in tensors_of(value)] == [1, 2]
    doubled = cast("dict[str, list[torch.Tensor]]", map_tensors(value, lambda tensor: tensor * 2))
    assert doubled["a"][0].item() == 2
    assert describe(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bfloat16 [2, 3]"
