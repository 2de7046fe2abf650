"""How the rows of a tensor are cut into those of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .windows import Window


class Cut(NamedTuple):
    """A tensor's rows in pieces.

    Attributes:
        sizes: of the pieces.
        places: which of them are those of the requests.
        in_order: these are all, one after the other.
        window: the first of the requests' rows.
    """

    sizes: list[int]
    places: list[int]
    in_order: bool
    window: Window


class Cuts:
    """Finds them, and knows the last one: windows stay from port to port, and comparing costs less than hashing."""

    def __init__(self) -> None:
        self._last: tuple[list[Window | None], Cut | None] | None = None  # in one piece, for any number of threads

    def at(self, windows: Sequence[Window | None]) -> Cut | None:
        """The rows cut at these windows, of which there is at least one.

        Returns:
            None where most rows are between the windows, so that copying all is a waste.
        """
        last = self._last
        if last is None or last[0] != windows:
            last = self._last = [*windows], _cut(tuple(windows))
        return last[1]


CUTS = Cuts()


@lru_cache(maxsize=256)
def _cut(windows: tuple[Window | None, ...]) -> Cut | None:
    taken = sorted((window, index) for index, window in enumerate(windows) if window is not None)
    if len(taken) < len(windows) or taken[0][0].total > 2 * sum(window.length for window, _ in taken):
        return None
    sizes: list[int] = []
    places = [0] * len(windows)
    end = 0
    for window, index in taken:
        if window.start > end:
            sizes.append(window.start - end)
        places[index] = len(sizes)
        sizes.append(window.length)
        end = window.start + window.length
    if taken[0][0].total > end:
        sizes.append(taken[0][0].total - end)
    return Cut(sizes, places, places == [*range(len(sizes))], taken[0][0])
