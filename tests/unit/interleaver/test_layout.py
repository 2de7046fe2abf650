"""Parts of tensors and wholes: a split layer's columns in the order that one rank would have them in."""

from __future__ import annotations

import pytest
import torch

from invivo.interleaver.layout import SUMMED, WHOLE, Layout, Piece


def parts_of(layout: Layout, whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [layout.cut(whole, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "layout",
    [
        WHOLE,
        SUMMED,
        Layout(pieces=(Piece(3),)),
        Layout(pieces=(Piece(4), Piece(2))),
        Layout(pieces=(Piece(4), Piece(2), Piece(1))),
        Layout(-2, (Piece(2),), last=5),
    ],
)
def test_the_parts_of_a_whole_make_it_again(layout: Layout, ranks: int) -> None:
    shape = layout.shape(torch.Size([7, layout.part or 3, 5] if layout.dim == -2 else [7, layout.part or 3]), ranks)
    whole = torch.randn(shape)
    parts = parts_of(layout, whole, ranks)
    assert torch.equal(layout.join(parts), whole)
    assert layout.fits(whole.shape, ranks, whole=True) or layout.part == 0
    assert all(layout.shape(part.shape, ranks) == whole.shape for part in parts)


def test_a_merged_layer_has_each_of_its_projections_in_one_piece() -> None:
    gate, up = torch.arange(4.0), torch.arange(10.0, 14)
    layout = Layout(pieces=(Piece(2), Piece(2)))
    parts = [torch.cat([gate[:2], up[:2]])[None], torch.cat([gate[2:], up[2:]])[None]]
    assert torch.equal(layout.join(parts)[0], torch.cat([gate, up]))


def test_heads_that_several_ranks_have_are_in_the_whole_once() -> None:
    """Four ranks, four query heads of two columns, two key heads: ranks 0 and 1 have the first of these."""
    layout = Layout(pieces=(Piece(2), Piece(2, replicas=2)))
    queries, keys = torch.arange(8.0), torch.arange(100.0, 104)
    whole = torch.cat([queries, keys])[None]
    parts = parts_of(layout, whole, 4)
    assert [part[0].tolist() for part in parts] == [
        [0, 1, 100, 101],
        [2, 3, 100, 101],
        [4, 5, 102, 103],
        [6, 7, 102, 103],
    ]
    assert layout.total(4) == 12 and torch.equal(layout.join(parts), whole)


def test_a_sum_is_written_to_one_rank() -> None:
    whole = torch.randn(2, 3)
    assert torch.equal(SUMMED.join(parts_of(SUMMED, whole, 3)), whole)
    assert torch.equal(SUMMED.join([whole, whole]), 2 * whole)


def test_what_fits() -> None:
    heads = Layout(-2, (Piece(2),), last=8)
    assert heads.fits([5, 2, 8], 2) and not heads.fits([5, 2, 4], 2) and not heads.fits([8], 2)
    assert heads.fits([5, 4, 8], 2, whole=True) and not heads.fits([5, 2, 8], 2, whole=True)
