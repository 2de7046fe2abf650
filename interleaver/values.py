"""Copies of what modules take and give, and how edits get back.

A block never holds the model's own tensors: it gets copies of its rows, in the module's own structure (tuples, lists,
dicts), and what it changed is written into a copy of the whole tensor, which the model goes on with. So in-place
kernels cannot change what was read, and an edit cannot leak into another use of the same storage.

Copies are made outside of inference mode, so that they carry a version counter: an untouched copy is recognised and
costs no write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple, cast

import torch

from ..envoy.address import Port
from ..envoy.errors import UnsupportedError, WriteError
from .torch_compat import inference_mode, inference_on, split_with_sizes_copy, version_of
from .windows import Window

Leaves = list[torch.Tensor]


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """The same structure with every tensor changed; anything that is no container or tensor is kept as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        make: Callable[..., object] = getattr(value, "_make", tuple)  # of a named tuple
        return type(value)(items) if hasattr(value, "n_sequence_fields") else make(items)  # torch.return_types
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        items_by_key = {key: map_tensors(item, change) for key, item in value.items()}
        if hasattr(value, "to_tuple"):  # a transformers ModelOutput
            return type(value)(**items_by_key)
        same = copy.copy(value)
        same.update(items_by_key)
        return same
    return value


def tensors_of(value: object) -> Leaves:
    """All tensors of a structure, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: Leaves = []
    map_tensors(value, _noted_in(found))
    return found


def _noted_in(found: Leaves) -> Callable[[torch.Tensor], torch.Tensor]:
    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    return note


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


def copies(value: object, windows: Sequence[Window | None], where: Port) -> Sequence[object]:
    """A private copy of each request's rows (all rows where the window is None), made with as few calls as can be.

    Args:
        value: what the module took or gave, whole.
        windows: rows of each request; no two overlap.
        where: the port, for messages.

    Raises:
        UnsupportedError: the rows cannot be told (`row_dim`).
    """
    if inference_on():
        with inference_mode(False):
            return copies(value, windows, where)
    if len(windows) == 1:
        return (_copy(value, windows[0], where),)
    if type(value) is torch.Tensor:
        return _split(value, windows, where)
    if type(value) is tuple and value and all(part is None or type(part) is torch.Tensor for part in value):
        nothing = [None] * len(windows)
        parts = (_split(part, windows, where) if part is not None else nothing for part in value)
        return [*zip(*parts, strict=True)]
    return [_copy(value, window, where) for window in windows]


def _copy(value: object, window: Window | None, where: Port) -> object:
    if not isinstance(value, torch.Tensor):
        return map_tensors(value, lambda tensor: cast(torch.Tensor, _copy(tensor, window, where)))
    if value.requires_grad:
        value = value.detach()
    if window is not None:
        dim = row_dim(value, window, where)
        if window.length != window.total:
            value = value.narrow(dim, window.start, window.length)
    return value.clone()


def _split(value: torch.Tensor, windows: Sequence[Window | None], where: Port) -> Sequence[torch.Tensor]:
    """Copies of several runs of rows: in one call where they are most of the tensor."""
    cut = _cut(tuple(windows))
    if cut is None or value.requires_grad:
        return [cast(torch.Tensor, _copy(value, window, where)) for window in windows]
    parts = split_with_sizes_copy(value, cut.sizes, row_dim(value, cut.window, where))
    return [parts[place] for place in cut.places]


class _Cut(NamedTuple):
    """A tensor's rows in pieces: their sizes, and which of them are those of the requests, the first one's being
    `window`."""

    sizes: list[int]
    places: list[int]
    window: Window


@lru_cache(maxsize=256)
def _cut(windows: tuple[Window | None, ...]) -> _Cut | None:
    """The rows cut at the windows; None where most rows are between the windows, so that copying all is a waste."""
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
    return _Cut(sizes, places, taken[0][0])


Change = tuple["list[torch.Tensor | None]", "Window | None"]
"""What one request has put in place of the tensors of a value, None for those to be left alone; and its rows."""


def put_rows(value: object, changes: Sequence[Change], where: Port) -> object:
    """`value` with the rows of some requests replaced where they changed; `value` itself stays as it is.

    Args:
        value: what the module took or gave, whole.
        changes: of each request that changed something (`Held.changes`); no two have rows in common.
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
    cut = _cut(tuple(rows for _, rows in changed)) if others and tensor.is_contiguous() else None
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


class Held:
    """What a block holds of the port that it is at: the copy, and whether it was changed.

    Attributes:
        value: the copy, or what was assigned in its place.
        limit: for token ids, the size of the vocabulary.
        fixed: why the value cannot be changed; None if it can.
        left_alone: the block has gone on, and has changed nothing (`settle`).

    Edits go back by their place in the structure. The block may change lists and dicts of its copy, so how these were
    is kept.
    """

    __slots__ = ("_containers", "_copy", "_shapes", "_tensors", "_version", "fixed", "left_alone", "limit", "value")

    def __init__(self, value: object, limit: int | None = None, fixed: str | None = None) -> None:
        self.value = self._copy = value
        self.limit = limit
        self.fixed = fixed
        self.left_alone = False
        self._containers: object = None
        if type(value) is torch.Tensor:  # the usual case, here and below, is told apart quickly
            self._version: int | list[int] = version_of(value)
            self._shapes = [value.shape]
            return
        self._tensors: Leaves = []
        containers = map_tensors(value, _noted_in(self._tensors))
        self._containers = containers if _can_change(containers) else None
        self._version = [*map(version_of, self._tensors)]
        self._shapes = [tensor.shape for tensor in self._tensors]

    def assign(self, value: object, where: str) -> None:
        """Put `value` in place of the copy.

        Raises:
            WriteError: it has another structure, shape, dtype or device.
        """
        if self.fixed is not None:
            raise WriteError(self.fixed)
        _fit(self.value, value, where)
        self.value = value

    def settle(self) -> None:
        """Check the edits while the block is still at the port, so that an error is raised at its own line.

        Raises:
            WriteError: the containers of the copy no longer fit what the model works on.
        """
        value = self.value
        if value is self._copy:
            version = self._version
            if type(version) is int:
                self.left_alone = version_of(value) == version  # type: ignore[arg-type]  # it is a tensor
            else:  # lists and dicts may have changed
                self.left_alone = self._containers is None and [*map(version_of, self._tensors)] == version
            if self.left_alone:
                return
        if self.fixed is not None:
            raise WriteError(self.fixed)
        now = tensors_of(self.value)
        if [tensor.shape for tensor in now] != self._shapes:
            before = [_named(shape, tensor.dtype) for shape, tensor in zip(self._shapes, self._before(), strict=True)]
            raise WriteError(
                "what a port holds was changed in a way that the model cannot go on with: it had tensors "
                f"{before} and has {[describe(tensor) for tensor in now]}."
            )
        if self._containers is not None:
            _fit(self._containers, self.value, "what the port holds")
        if self.limit is not None and any(bool(((t < 0) | (t >= self.limit)).any()) for t in now):
            raise WriteError(f"`model.samples` takes token ids from 0 to {self.limit - 1}.")

    def changes(self) -> list[torch.Tensor | None] | None:
        """One entry per tensor, None for the untouched ones; None if nothing was touched."""
        version = self._version
        if isinstance(version, int):
            tensor = cast(torch.Tensor, self.value)
            return [tensor] if tensor is not self._copy or version_of(tensor) != version else None
        changed = [
            tensor if tensor is not original or version_of(tensor) != before else None
            for tensor, original, before in zip(tensors_of(self.value), self._tensors, version, strict=True)
        ]
        return changed if any(tensor is not None for tensor in changed) else None

    def _before(self) -> Leaves:
        """The tensors of the copy."""
        return [self._copy] if isinstance(self._copy, torch.Tensor) else self._tensors


def _can_change(value: object) -> bool:
    """Whether a structure has lists or dicts in it."""
    return isinstance(value, list | dict) or (isinstance(value, tuple) and any(map(_can_change, value)))


def _fit(expected: object, given: object, where: str) -> None:
    """Check that `given` can stand in for `expected`."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(given, torch.Tensor):
            raise WriteError(
                f"{where} takes {describe(expected)}, and got {_kind(given)}. To fill it with one value, write "
                f"`{where}[:] = ...`."
            )
        differences = [
            name
            for name, a, b in (
                ("shape", expected.shape, given.shape),
                ("dtype", expected.dtype, given.dtype),
                ("device", expected.device, given.device),
                ("layout", expected.layout, given.layout),
            )
            if a != b
        ]
        if differences:
            raise WriteError(
                f"{where} takes {describe(expected)}, and got {describe(given)}: the {' and '.join(differences)} must "
                "be the same. Convert the value (`.to(...)`, `.expand(...)`), or edit the rows in place."
            )
        return
    if isinstance(expected, tuple | list):
        if not isinstance(given, tuple | list) or len(given) != len(expected):
            raise WriteError(
                f"{where} takes a {_kind(expected)} of {len(expected)} values, and got {_kind(given)}. To change "
                f"one of them, write into it: `{where}[0][:] = ...`."
            )
        for index, (one, other) in enumerate(zip(expected, given, strict=True)):
            _fit(one, other, f"{where}[{index}]")
        return
    if isinstance(expected, dict):
        if not isinstance(given, dict) or list(given) != list(expected):
            got = f"the keys {list(given)}" if isinstance(given, dict) else _kind(given)
            raise WriteError(f"{where} takes a dict with the keys {list(expected)}, in this order, and got {got}.")
        for key, one in expected.items():
            _fit(one, given[key], f"{where}[{key!r}]")
        return
    if given is not expected and given != expected:
        raise WriteError(f"{where} holds {expected!r}, which is not a tensor and cannot be replaced.")


def describe(tensor: torch.Tensor) -> str:
    """``float32 [5, 576]``, with the device unless it is the CPU."""
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return _named(*_form(tensor)) + device


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _named(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _kind(value: object) -> str:
    return describe(value) if isinstance(value, torch.Tensor) else type(value).__name__
