"""Copies of what modules take and give, and how edits get back.

A block never holds the model's own tensors: it gets copies of its rows, in the module's own structure (tuples, lists,
dicts), and what it changed is written into a copy of the whole tensor, which the model goes on with. So in-place
kernels cannot change what was read, and an edit cannot leak into another use of the same storage.

Copies are made outside of inference mode, so that they carry a version counter: an untouched copy is recognised and
costs no write.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, TypeAlias, TypeGuard, cast

import torch

from ..envoy.address import Port
from ..envoy.errors import UnsupportedError, WriteError
from .bounds import Bounds
from .cuts import CUTS
from .fit import check_fit, describe, named
from .structure import can_change, map_tensors, noted_in, own, tensors_of
from .torch_compat import clone_each, inference_mode, inference_on, split_with_sizes_copy, version_of
from .windows import Window


def row_dim(tensor: torch.Tensor, window: Window, where: Port) -> int:
    """The dimension of `tensor` that has one entry per row.

    Raises:
        UnsupportedError: neither the first dimension nor, behind a leading one, the second has `window.total` entries.
    """
    shape = tensor.shape
    if len(shape) >= 1 and shape[0] == window.total:
        return 0
    if len(shape) >= 2 and shape[0] == 1 and shape[1] == window.total:
        return 1
    raise UnsupportedError(
        f"{where} holds a tensor of shape {list(shape)}, in which the rows of this request cannot be told: the step "
        f"has {window.total} rows. Read the inputs or outputs of a module around it."
    )


Versions: TypeAlias = int | list[int] | None
"""How often private copies were changed when they were new: of a tensor, of the tensors of a flat tuple; None for other
structures."""


def copies(value: object, windows: Sequence[Window | None], where: Port) -> tuple[Sequence[object], Versions]:
    """A private copy of each request's rows (all rows where the window is None), made with as few calls as can be.

    Args:
        value: what the module took or gave, whole.
        windows: rows of each request; no two overlap.
        where: the port, for messages.

    Returns:
        The copies, and the versions of their tensors, which all of them have in common.

    Raises:
        UnsupportedError: the rows cannot be told (`row_dim`).
    """
    if inference_on():
        with inference_mode(False):
            return copies(value, windows, where)
    if type(value) is torch.Tensor:
        made = pieces(value, windows, where)
        return made, version_of(made[0])
    if is_flat(value):
        columns = _columns(value, windows, where)
        return [*zip(*columns, strict=True)], [version_of(column[0]) for column in columns]
    return [_copy(value, window, where) for window in windows], None


def copy_of(value: object, window: Window | None, where: Port) -> tuple[object, Versions]:
    """A private copy of one request's rows, as `copies` makes them."""
    if inference_on():
        with inference_mode(False):
            return copy_of(value, window, where)
    if type(value) is torch.Tensor:
        piece = value.clone() if window is None and not value.requires_grad else copy_of_tensor(value, window, where)
        return piece, version_of(piece)
    if is_flat(value):
        parts = tuple([copy_of_tensor(part, window, where) for part in value])
        return parts, [*map(version_of, parts)]
    return _copy(value, window, where), None


def rows_of(value: object, window: Window | None, where: Port) -> list[torch.Tensor] | None:
    """Views of a request's rows of each tensor; None if the value is no tensor and no flat tuple of them.

    Raises:
        UnsupportedError: the rows cannot be told (`row_dim`).
    """
    parts = (value,) if type(value) is torch.Tensor else value if is_flat(value) else None
    return None if parts is None else [_view(part, window, where) for part in parts]


def is_flat(value: object) -> TypeGuard[tuple[torch.Tensor, ...]]:
    """Whether a value is a plain tuple of tensors."""
    return type(value) is tuple and len(value) > 0 and all(type(part) is torch.Tensor for part in value)


def _copy(value: object, window: Window | None, where: Port) -> object:
    return map_tensors(value, lambda tensor: _piece(tensor, window, where), own)


def _piece(tensor: torch.Tensor, window: Window | None, where: Port) -> torch.Tensor:
    return _view(tensor, window, where).clone()


def copy_of_tensor(tensor: torch.Tensor, window: Window | None, where: Port) -> torch.Tensor:
    """A copy of one run of rows; versions are not the same, as `narrow_copy` and `clone` begin to count differently."""
    if window is not None and window.length == 1 < window.total and tensor.is_contiguous() and not tensor.requires_grad:
        return torch.narrow_copy(tensor, row_dim(tensor, window, where), window.start, 1)  # half of what two calls take
    return _piece(tensor, window, where)


def _view(tensor: torch.Tensor, window: Window | None, where: Port) -> torch.Tensor:
    """One run of rows."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if window is not None:
        dim = row_dim(tensor, window, where)
        if window.length != window.total:
            tensor = tensor.narrow(dim, window.start, window.length)
    return tensor


def pieces(tensor: torch.Tensor, windows: Sequence[Window | None], where: Port) -> Sequence[torch.Tensor]:
    """Copies of several runs of rows: in one call where they are most of the tensor."""
    cut = CUTS.at(windows)
    if cut is None or tensor.requires_grad:
        return [_piece(tensor, window, where) for window in windows]
    if tensor.is_cuda:
        return clone_each(_views(tensor, windows, where))
    parts = split_with_sizes_copy(tensor, cut.sizes, row_dim(tensor, cut.window, where))
    return parts if cut.in_order else [parts[place] for place in cut.places]


def _columns(
    value: tuple[torch.Tensor, ...], windows: Sequence[Window | None], where: Port
) -> list[Sequence[torch.Tensor]]:
    """Copies of several runs of rows of each tensor."""
    blocks = len(windows)
    if blocks == 1 or not value[0].is_cuda:
        return [pieces(tensor, windows, where) for tensor in value]
    made = clone_each([view for tensor in value for view in _views(tensor, windows, where)])
    return [made[begin : begin + blocks] for begin in range(0, len(made), blocks)]


def _views(tensor: torch.Tensor, windows: Sequence[Window | None], where: Port) -> list[torch.Tensor]:
    """Several runs of rows. On a GPU, copying these costs less than `split_with_sizes_copy`: one kernel, not many."""
    cut = CUTS.at(windows)
    if cut is None or tensor.requires_grad:
        return [_view(tensor, window, where) for window in windows]
    views = tensor.split_with_sizes(cut.sizes, row_dim(tensor, cut.window, where))
    return [*views] if cut.in_order else [views[place] for place in cut.places]


Change = tuple["list[torch.Tensor | None]", "Window | None"]
"""What one request has put in place of the tensors of a value, None for those to be left alone; and its rows."""


def put_rows(value: object, changes: Sequence[Change], where: Port) -> object:
    """`value` with the rows of some requests replaced where they changed; `value` itself stays as it is.

    Args:
        value: what the module took or gave, whole.
        changes: of each request that changed something (`Held.changed`); no two have rows in common.
        where: the port, for messages.
    """
    if type(value) is torch.Tensor:
        return _put(value, [(new[0], window) for new, window in changes if new[0] is not None], where)
    number = count()

    def put(tensor: torch.Tensor) -> torch.Tensor:
        at = next(number)
        changed = [(part, window) for new, window in changes if (part := new[at]) is not None]
        return _put(tensor, changed, where) if changed else tensor

    return map_tensors(value, put)


def _put(tensor: torch.Tensor, changed: list[tuple[torch.Tensor, Window | None]], where: Port) -> torch.Tensor:
    (first, window), *others = changed
    if window is None or first.shape == tensor.shape:
        return _like(first, tensor)
    dim = row_dim(tensor, window, where)
    cut = CUTS.at([rows for _, rows in changed]) if others and tensor.is_contiguous() else None
    if cut is not None:
        pieces = [*tensor.split_with_sizes(cut.sizes, dim)]
        for (new, _), place in zip(changed, cut.places, strict=True):
            pieces[place] = new
        return torch.cat(pieces, dim)
    whole = tensor.clone()
    for new, rows in cast("list[tuple[torch.Tensor, Window]]", changed):
        whole.narrow(dim, rows.start, rows.length).copy_(new)
    return whole


def _like(change: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `change`, laid out in memory as `tensor` is: kernels rely on that, and do not all look."""
    return change.clone() if change.stride() == tensor.stride() else torch.empty_like(tensor).copy_(change)


class Passing:
    """What passes at a port, which is whole, and what blocks may do with their rows of it.

    Attributes:
        value: what the module took or gave.
        port: the port.
        limit: for token ids, the size of the vocabulary.
        fixed: why the value cannot be changed; None if it can.
    """

    __slots__ = ("_shapes", "fixed", "limit", "port", "value")

    def __init__(self, value: object, port: Port, limit: int | None = None, fixed: str | None = None) -> None:
        self.value = value
        self.port = port
        self.limit = limit
        self.fixed = fixed
        self._shapes: dict[int | None, list[torch.Size]] | None = None

    def shapes(self, window: Window | None) -> list[torch.Size]:
        """The shapes of a request's rows of each tensor."""
        if self._shapes is None:
            self._shapes = {}
        found = self._shapes.get(length := window.length if window is not None else None)
        if found is None:
            found = self._shapes[length] = [self.shape(tensor, window) for tensor in tensors_of(self.value)]
        return found

    def shape(self, tensor: torch.Tensor, window: Window | None) -> torch.Size:
        """That of its rows of one tensor."""
        if window is None:
            return tensor.shape
        dim = row_dim(tensor, window, self.port)
        return torch.Size((*tensor.shape[:dim], window.length, *tensor.shape[dim + 1 :]))


class Held:
    """What a block holds of the port that it is at: the copy, and whether it was changed.

    Args:
        copy: its copy of `passing`, one of `copies`.
        versions: those that came with it.
        window: the block's rows.
        passing: what passes there.

    Attributes:
        value: the copy, or what was assigned in its place.
        changed: what the block has put in place of the tensors, when it has gone on (`settle`): one entry per tensor,
            None for the untouched ones; None if nothing was touched.

    Edits go back by their place in the structure. The block may change lists and dicts of its copy, so how these were
    is kept.
    """

    __slots__ = ("_containers", "_copy", "_passing", "_tensors", "_versions", "_window", "changed", "value")

    def __init__(self, copy: object, versions: Versions, window: Window | None, passing: Passing) -> None:
        self.value = self._copy = copy
        self._versions = versions
        self._window = window
        self._passing = passing
        self.changed: list[torch.Tensor | None] | None = None
        self._tensors: Any = copy  # in the usual cases, a tensor and a flat tuple of them
        self._containers: object = None
        if versions is None:
            self._tensors = []
            containers = map_tensors(copy, noted_in(self._tensors), own)
            self._containers = containers if can_change(containers) else None
            self._versions = [*map(version_of, self._tensors)]

    def item(self, index: int) -> object:
        """``value[index]``."""
        return self.value[index]  # type: ignore[index]  # if it cannot be, the block is told by Python

    def assign(self, value: object, where: str) -> None:
        """Put `value` in place of the copy.

        Raises:
            WriteError: it has another structure, shape, dtype or device.
        """
        if self._passing.fixed is not None:
            raise WriteError(self._passing.fixed)
        check_fit(self.value, value, where)
        self.value = value

    def settle(self, bounds: Bounds | None = None) -> None:
        """See what was changed, and check it while the block is still at the port: errors are raised at its own line.

        Raises:
            WriteError: the containers of the copy no longer fit what the model works on, or it cannot look up a number.
        """
        value, versions = self.value, self._versions
        if value is self._copy:  # tensors that take its place may be of inference mode, and have no version
            if type(versions) is int:
                if version_of(value) == versions:  # type: ignore[arg-type]  # it is a tensor
                    return
            elif self._containers is None and [*map(version_of, self._tensors)] == versions:
                return
        try:
            changed = self._changes()
            if changed is not None and bounds is not None:
                bounds.check(self._passing.port, changed)
            self.changed = changed
        except (WriteError, UnsupportedError):
            self._begin_again()
            raise

    def _changes(self) -> list[torch.Tensor | None] | None:
        """What is in place of the tensors now, if it can be."""
        value, versions = self.value, self._versions
        usual = value is self._copy and self._containers is None
        now = self._before() if usual else tensors_of(value)
        changed: list[torch.Tensor | None] = [*now]
        untouched = False
        if isinstance(versions, list) and len(versions) == len(now):  # else the one tensor is another or was changed
            for at, (tensor, old, version) in enumerate(zip(now, self._before(), versions, strict=True)):
                if tensor is old and version_of(tensor) == version:
                    changed[at] = None
            untouched = all(tensor is None for tensor in changed)
        if not untouched:
            self._check_shapes(now)
        if self._containers is not None:
            check_fit(self._containers, value, "what the port holds")
        if untouched:
            return None
        fixed, limit = self._passing.fixed, self._passing.limit
        if fixed is not None:
            raise WriteError(fixed)
        if limit is not None and any(bool(((t < 0) | (t >= limit)).any()) for t in now):
            raise WriteError(f"`model.samples` takes token ids from 0 to {limit - 1}.")
        return changed

    def _check_shapes(self, now: Sequence[torch.Tensor]) -> None:
        expected = self._passing.shapes(self._window)
        if [tensor.shape for tensor in now] != expected:
            before = self._before()
            had = [named(shape, tensor.dtype) for shape, tensor in zip(expected, before, strict=True)]
            raise WriteError(
                "what a port holds was changed in a way that the model cannot go on with: it had tensors "
                f"{had} and has {[describe(tensor) for tensor in now]}."
            )

    def _begin_again(self) -> None:
        """Forget what the model cannot go on with: a block that catches the error goes on as if it were untouched."""
        self.changed = None
        if self._containers is not None:
            self._copy = self._containers
            self._containers = map_tensors(self._copy, lambda tensor: tensor, own)
        self.value = self._copy
        versions = [*map(version_of, self._before())]
        self._versions = versions[0] if isinstance(self._tensors, torch.Tensor) else versions

    def _before(self) -> Sequence[torch.Tensor]:
        """The tensors of the copy."""
        tensors = self._tensors
        return [tensors] if isinstance(tensors, torch.Tensor) else tensors
