"""Copies of what modules take and give, and how edits get back.

A block never holds the model's own tensors: it gets copies of its rows, in the module's own structure (tuples, lists,
dicts), and what it changed is written into a copy of the whole tensor, which the model goes on with. So in-place
kernels cannot change what was read, and an edit cannot leak into another use of the same storage.

Copies are made outside of inference mode, so that they carry a version counter: an untouched copy is recognised and
costs no write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch

from ..envoy.address import Port
from ..envoy.errors import UnsupportedError, WriteError
from .torch_compat import inference_mode, version_of
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


def copy_rows(value: object, window: Window | None, where: Port) -> object:
    """A private copy of the request's rows; all rows if `window` is None."""
    if torch.is_inference_mode_enabled():
        with inference_mode(False):
            return copy_rows(value, window, where)
    if not isinstance(value, torch.Tensor):
        return map_tensors(value, lambda tensor: cast(torch.Tensor, copy_rows(tensor, window, where)))
    if value.requires_grad:
        value = value.detach()
    if window is not None:
        value = value.narrow(row_dim(value, window, where), window.start, window.length)
    return value.clone()


def put_rows(value: object, changes: list[torch.Tensor | None], window: Window | None, where: Port) -> object:
    """`value` with the request's rows replaced where they changed; `value` itself stays as it is.

    Args:
        value: what the module took or gave, whole.
        changes: one entry per tensor of `value`, None for those to be left alone (`Held.changes`).
        window: the request's rows; None for all.
        where: the port, for messages.
    """
    if isinstance(value, torch.Tensor) and window is None and changes[0] is not None:
        return _like(changes[0], value)
    remaining = iter(changes)

    def put(tensor: torch.Tensor) -> torch.Tensor:
        change = next(remaining)
        if change is None:
            return tensor
        if window is None or change.shape == tensor.shape:
            return _like(change, tensor)
        whole = tensor.clone()
        whole.narrow(row_dim(tensor, window, where), window.start, window.length).copy_(change)
        return whole

    return map_tensors(value, put)


def _like(change: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `change`, laid out in memory as `tensor` is: kernels rely on that, and do not all look."""
    return change.clone() if change.stride() == tensor.stride() else torch.empty_like(tensor).copy_(change)


class Held:
    """What a block holds of the port that it is at: the copy, and whether it was changed.

    Attributes:
        value: the copy, or what was assigned in its place.
        limit: for token ids, the size of the vocabulary.
        fixed: why the value cannot be changed; None if it can.

    Edits go back by their place in the structure. The block may change lists and dicts of its copy, so how these were
    is kept.
    """

    __slots__ = ("_containers", "_forms", "_originals", "_tensor", "_version", "_versions", "fixed", "limit", "value")

    def __init__(self, value: object, limit: int | None = None, fixed: str | None = None) -> None:
        self.value = value
        self.limit = limit
        self.fixed = fixed
        if isinstance(value, torch.Tensor):  # the usual case, here and below, is told apart quickly
            self._tensor: torch.Tensor | None = value
            self._version = version_of(value)
            self._forms = [(value.shape, value.dtype)]
            self._containers = None
        else:
            self._tensor = None
            self._originals: Leaves = []
            containers = map_tensors(value, _noted_in(self._originals))
            self._containers = containers if _can_change(containers) else None
            self._versions = [version_of(tensor) for tensor in self._originals]
            self._forms = [_form(tensor) for tensor in self._originals]

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
        tensor = self._tensor
        if tensor is not None and self.value is tensor and version_of(tensor) == self._version:
            return
        if self.fixed is not None:
            raise WriteError(self.fixed)
        now = tensors_of(self.value)
        if [_form(tensor) for tensor in now] != self._forms:
            raise WriteError(
                "what a port holds was changed in a way that the model cannot go on with: it had tensors "
                f"{[_named(*form) for form in self._forms]} and has {[describe(tensor) for tensor in now]}."
            )
        if self._containers is not None:
            _fit(self._containers, self.value, "what the port holds")
        if self.limit is not None and any(bool(((t < 0) | (t >= self.limit)).any()) for t in now):
            raise WriteError(f"`model.samples` takes token ids from 0 to {self.limit - 1}.")

    def changes(self) -> list[torch.Tensor | None] | None:
        """One entry per tensor, None for the untouched ones; None if nothing was touched."""
        tensor = self._tensor
        if tensor is not None and self.value is tensor and version_of(tensor) == self._version:
            return None
        now = tensors_of(self.value)
        if tensor is not None:
            return [*now]
        changed = [
            tensor if tensor is not original or version_of(tensor) != version else None
            for tensor, original, version in zip(now, self._originals, self._versions, strict=True)
        ]
        return changed if any(tensor is not None for tensor in changed) else None


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
