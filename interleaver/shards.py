"""The ports of a model that is split over ranks: made whole when they are read, split when they were written.

Only rows of requests whose blocks wait at the port travel, and only where the port holds parts. What layers give that
are split is known by their classes (`Layouts`). Everything else should be whole on every rank, and whether it is has
been seen: the first time that a port is read, the ranks compare what they hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import count
from typing import Protocol

import torch

from ..envoy.address import Port
from ..envoy.errors import InternalError, UnsupportedError
from .layout import Layout
from .ranks import Pieces, Ranks
from .structure import map_tensors, tensors_of
from .values import Change, row_dim
from .windows import Window


class Layouts(Protocol):
    """What is known of the layers of a model."""

    def of(self, port: Port, number: int, tensor: torch.Tensor, *, whole: bool = False) -> Layout:
        """How a tensor at a port is laid out.

        Args:
            port: of a module.
            number: the place of the tensor among those that the port holds.
            tensor: a rank's part, or
            whole: what it is to be a part of.

        Raises:
            UnsupportedError: nothing is known of this class of modules, and it is one that splits.
        """
        ...

    def name(self, port: Port) -> str:
        """The class of the port's module, for messages."""
        ...


class Shards:
    """The ports of one rank's part of a model.

    Args:
        ranks: all of them.
        layouts: what its layers give.
    """

    def __init__(self, ranks: Ranks, layouts: Layouts) -> None:
        self.ranks = ranks
        self._layouts = layouts
        self._seen: set[tuple[Port, int]] = set()

    def whole_rows(
        self, value: object, windows: Sequence[Window | None], port: Port
    ) -> tuple[object, Sequence[Window | None]]:
        """The whole of what a port holds, as far as blocks have rows of it, and where these are in it.

        Raises:
            UnsupportedError: the rows cannot be told, or how the parts make the whole is not known.
        """
        if port.of_step:
            return value, windows
        tensors = tensors_of(value)
        layouts = self._of(port, tensors)
        rows = [_rows(tensor, windows, port) for tensor in tensors]
        split = [number for number, layout in enumerate(layouts) if not layout.whole]
        travel = [rows[number] for number in split]
        self._meet(port, rows, layouts, travel)
        if not split:
            return value, windows
        parts = dict(zip(split, zip(*self.ranks.gather(travel, port), strict=True), strict=True))
        number = count()

        def whole(_: torch.Tensor) -> torch.Tensor:
            at = next(number)
            return layouts[at].join(parts[at]) if at in parts else rows[at].joined()

        return map_tensors(value, whole), _closed_up(windows)

    def cut(self, value: object, changes: Sequence[Change], port: Port) -> list[Change]:
        """This rank's part of what blocks put in place of a value."""
        if port.of_step:
            return list(changes)
        rank, size = self.ranks.rank, self.ranks.size
        layouts = self._of(port, tensors_of(value))
        return [
            (
                [
                    layout.cut(new, rank, size) if new is not None else None
                    for new, layout in zip(change, layouts, strict=True)
                ],
                window,
            )
            for change, window in changes
        ]

    def part(self, value: object, port: Port) -> object:
        """This rank's part of a whole value that a module is called with."""
        number = count()
        rank, size = self.ranks.rank, self.ranks.size
        return map_tensors(
            value,
            lambda tensor: self._layouts.of(port, next(number), tensor, whole=True).cut(tensor, rank, size),
        )

    def whole(self, value: object, port: Port) -> object:
        """The whole of what a module has returned."""
        tensors = tensors_of(value)
        layouts = self._of(port, tensors)
        split = [number for number, layout in enumerate(layouts) if not layout.whole]
        if not split:
            return value
        travel = [Pieces([tensors[number]]) for number in split]
        self._meet(port, (), (), travel)
        parts = dict(zip(split, zip(*self.ranks.gather(travel, port), strict=True), strict=True))
        number = count()

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            at = next(number)
            return layouts[at].join(parts[at]) if at in parts else tensor

        return map_tensors(value, whole)

    def outline(self, value: object, port: Port) -> object:
        """Tensors without data in the shapes of the whole."""
        number = count()

        def outline(tensor: torch.Tensor) -> torch.Tensor:
            layout = self._layouts.of(port, next(number), tensor)
            return torch.empty(layout.shape(tensor.shape, self.ranks.size), dtype=tensor.dtype, device="meta")

        return map_tensors(value, outline)

    def _of(self, port: Port, tensors: Sequence[torch.Tensor]) -> list[Layout]:
        return [self._layouts.of(port, number, tensor) for number, tensor in enumerate(tensors)]

    def _meet(self, port: Port, rows: Sequence[Pieces], layouts: Sequence[Layout], travel: Sequence[Pieces]) -> None:
        """Before rows travel: compare what the ranks hold at a port that nobody has read yet, and make room.

        No rank is waited for that cannot: it says so, and nothing travels.

        Raises:
            UnsupportedError: how the parts make the whole is not known.
            InternalError: another rank has failed.
            whatever has failed on this one.
        """
        new = [number for number in range(len(rows)) if (port, number) not in self._seen]
        roomy = not travel or self.ranks.fits(travel)
        if not new and roomy:
            return
        sums = [0] * len(new)
        failure: Exception | None = None
        try:
            sums = [_checksum(rows[number].pieces) for number in new]
            if not roomy:
                self.ranks.make_room(travel)
        except Exception as error:
            failure = error
        said = self.ranks.exchange([failure is not None, *sums])
        if any(failed for failed, *_ in said):
            self.ranks.drop_room()
            text = f"{type(failure).__name__}: {failure}" if failure is not None else None
            texts = [one for one in self.ranks.exchange_any(text) if one is not None]
            raise failure or InternalError(f"another rank could not give its rows of {port}: {texts[0]}")
        for number, found in zip(new, zip(*(sums for _, *sums in said), strict=True), strict=True):
            self._compare(port, number, rows[number], layouts[number], found)
        self._seen.update((port, number) for number in new)

    def _compare(self, port: Port, number: int, rows: Pieces, layout: Layout, sums: Sequence[int]) -> None:
        differs = len(set(sums)) > 1
        parts = bool(layout.pieces) and all(piece.replicas == 1 for piece in layout.pieces)
        if (layout.whole and differs) or (parts and not differs and not _constant(rows.pieces)):
            raise UnsupportedError(
                f"{port} holds {'something else' if differs else 'the same'} on each of the {self.ranks.size} "
                f"ranks, and how {'these parts make' if differs else 'that makes'} the whole is not known for "
                f"modules of the class {self._layouts.name(port)} at this place. Read the ports of the layers "
                "before or after it."
            )


def _rows(tensor: torch.Tensor, windows: Sequence[Window | None], port: Port) -> Pieces:
    """The rows of all windows, one after the other."""
    found = []
    dim = 0
    for window in windows:
        if window is None or window.length == window.total:
            return Pieces([tensor])
        dim = row_dim(tensor, window, port)
        found.append(tensor.narrow(dim, window.start, window.length))
    return Pieces(found, dim)


def _closed_up(windows: Sequence[Window | None]) -> list[Window | None]:
    """The windows in a tensor that has their rows only."""
    total = sum(window.length for window in windows if window is not None)
    found: list[Window | None] = []
    start = 0
    for window in windows:
        if window is None:
            found.append(None)
            continue
        found.append(Window(start, window.length, total))
        start += window.length
    return found


def _constant(pieces: Sequence[torch.Tensor]) -> bool:
    """Whether all elements are the same, so that nothing can be told from them."""
    filled = [piece for piece in pieces if piece.numel()]
    return all(bool((piece == filled[0].reshape(-1)[0]).all()) for piece in filled)


def _checksum(pieces: Sequence[torch.Tensor]) -> int:
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return found


def checksum(change: Sequence[torch.Tensor | None]) -> int:
    """A number that tells edits apart."""
    found = 0
    for new in change:
        if new is not None:
            found = found * 31 + _checksum([new]) + 1
    return found & 0xFFFFFFFF
