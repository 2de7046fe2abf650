"""What blocks hold of a port: copies of all of it, or of some tensors of a tuple only.

Layers return several tensors, of which most blocks want the first, and say so: ``layer.output[0]``. A block that waits
for a port tells which one it will look at (`Mediator.asks`), and that one is copied for it; the others are if it comes
to look at them, too, as long as it is at the port.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ..envoy.address import SAMPLES, Port
from .bounds import Bounds
from .torch_compat import inference_mode, modes_on, version_of, without_modes
from .values import Held, Passing, copies, copy_of, copy_of_tensor, is_flat, pieces

if TYPE_CHECKING:
    from .mediator import Mediator
    from .supply import Supply
    from .windows import Window


def hold(value: object, window: Window | None, port: Port, asks: int | None) -> Held:
    """What one block holds of a port of a module; see `hold_each`."""
    if asks is not None and is_flat(value) and len(value) > 1:
        return HeldItems(Items(value, [window], port, (asks,)), 0, window, Passing(value, port))
    copy, versions = copy_of(value, window, port)
    return Held(copy, versions, window, Passing(value, port))


def hold_each(
    blocks: Sequence[Mediator],
    windows: Sequence[Window | None],
    value: object,
    port: Port,
    supply: Supply | None,
    vocabulary: int | None,
) -> Sequence[Held]:
    """What each of some blocks holds of the port that fires.

    Args:
        blocks: those that are there.
        windows: rows of each.
        value: what the module took or gave, whole.
        port: the port.
        supply: has the copies, if the forward has passed the port already.
        vocabulary: how many token ids there are.

    Raises:
        UnsupportedError: the rows cannot be told.
    """
    passing = Passing(value, port)
    if supply is None and is_flat(value) and len(value) > 1:
        asks = {block.asks for block in blocks}
        if None not in asks:
            items = Items(value, windows, port, cast("set[int]", asks))
            return [HeldItems(items, place, window, passing) for place, window in enumerate(windows)]
    made, versions = supply.copies(blocks, windows) if supply is not None else copies(value, windows, port)
    if port.kind == SAMPLES:
        each = [Passing(value, port, vocabulary, block.fixed_samples) for block in blocks]
        return [Held(copy, versions, window, one) for copy, window, one in zip(made, windows, each, strict=True)]
    return [Held(copy, versions, window, passing) for copy, window in zip(made, windows, strict=True)]


class Items:
    """The copies of a flat tuple's tensors for the blocks that meet at a port.

    Args:
        value: what the module took or gave, whole, which stays as it is while the blocks have their turns.
        windows: rows of each block.
        where: the port, for messages.
        asks: the places of those that some block will look at; copied now, if there are any such tensors.

    Raises:
        UnsupportedError: the rows cannot be told (`row_dim`).
    """

    def __init__(
        self, value: tuple[torch.Tensor, ...], windows: Sequence[Window | None], where: Port, asks: Iterable[int]
    ) -> None:
        self._value = value
        self._windows = windows
        self._where = where
        self._made: dict[int, tuple[Sequence[torch.Tensor], int]] = {}
        for item in asks:
            if item < len(value):
                self.copies(item)

    def __len__(self) -> int:
        return len(self._value)

    def copies(self, item: int) -> tuple[Sequence[torch.Tensor], int]:
        """Each block's copy of one tensor, and the version that all of them have."""
        made = self._made.get(item)
        if made is None:
            if modes_on():  # those of a block that looks at more than it asked for
                with without_modes():
                    made = self._copy(self._value[item])
            else:
                made = self._copy(self._value[item])
            self._made[item] = made
        return made

    def _copy(self, tensor: torch.Tensor) -> tuple[Sequence[torch.Tensor], int]:
        with inference_mode(False):
            if len(self._windows) == 1:
                made: Sequence[torch.Tensor] = [copy_of_tensor(tensor, self._windows[0], self._where)]
            else:
                made = pieces(tensor, self._windows, self._where)
        return made, version_of(made[0])


class HeldItems(Held):
    """What a block holds of a flat tuple whose tensors are copied when they are looked at.

    Args:
        items: the copies.
        place: that of the block among those that they are for.
        window, passing: see `Held`.
    """

    __slots__ = ("_items", "_own", "_place", "_whole")

    def __init__(self, items: Items, place: int, window: Window | None, passing: Passing) -> None:
        self._items = items
        self._place = place
        self._window = window
        self._passing = passing
        self._own: dict[int, tuple[torch.Tensor, int]] = {}
        self._whole: object = None
        self._containers = None
        self.changed = None

    @property
    def value(self) -> object:
        """See `Held`: all of it."""
        if self._whole is None:
            found = [self._item(item) for item in range(len(self._items))]
            self._whole = self._copy = self._tensors = tuple([tensor for tensor, _ in found])
            self._versions = [version for _, version in found]
        return self._whole

    @value.setter
    def value(self, value: object) -> None:
        self._whole = value

    def item(self, index: int) -> object:
        """See `Held`."""
        if self._whole is None and index < len(self._items):
            return self._item(index)[0]
        return super().item(index)

    def settle(self, bounds: Bounds | None = None) -> None:
        """See `Held`."""
        if self._whole is None:
            changed = [item for item, (tensor, version) in self._own.items() if version_of(tensor) != version]
            if not changed:
                return
            value, window = cast("tuple[torch.Tensor, ...]", self._passing.value), self._window
            if all(self._fits(self._own[item][0], self._passing.shape(value[item], window)) for item in changed):
                self.changed = [self._own[item][0] if item in changed else None for item in range(len(self._items))]
                return
        super().settle(bounds)

    @staticmethod
    def _fits(tensor: torch.Tensor, shape: torch.Size) -> bool:
        """Whether the model can surely go on with a changed tensor; else it is looked at with all others."""
        return tensor.shape == shape and tensor.is_floating_point()

    def _item(self, item: int) -> tuple[torch.Tensor, int]:
        found = self._own.get(item)
        if found is None:
            tensors, version = self._items.copies(item)
            found = self._own[item] = tensors[self._place], version
        return found
