"""Whether a value can stand in for what a port holds, and how tensors are described in messages."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import numpy as np
import torch

from ..envoy.errors import WriteError
from .structure import is_listing, is_record, parts_of


def check_fit(expected: object, given: object, where: str) -> None:
    """Check that `given` can stand in for `expected`, which `where` holds.

    Raises:
        WriteError: it has another structure, shape, dtype or device.
    """
    if isinstance(expected, torch.Tensor):
        if not isinstance(given, torch.Tensor):
            advice = f"To fill it with one value, write `{where}[:] = ...`."
            if not isinstance(given, numbers.Number):
                advice = "Give it a tensor (`torch.as_tensor(...)`), or edit the rows in place."
            raise WriteError(f"{where} takes {describe(expected)}, and got {_kind(given)}. {advice}")
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
    if isinstance(expected, tuple) or is_listing(expected):
        if not (isinstance(given, tuple) or is_listing(given)) or len(given) != len(expected):
            raise WriteError(
                f"{where} takes a {_kind(expected)} of {len(expected)} values, and got {_kind(given)}. To change "
                f"one of them, write into it: `{where}[0][:] = ...`."
            )
        for index, (one, other) in enumerate(zip(expected, given, strict=True)):
            check_fit(one, other, f"{where}[{index}]")
        return
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping) or list(given) != list(expected):
            got = f"the keys {list(given)}" if isinstance(given, Mapping) else _kind(given)
            raise WriteError(f"{where} takes a dict with the keys {list(expected)}, in this order, and got {got}.")
        for key, one in expected.items():
            check_fit(one, given[key], f"{where}[{key!r}]")
        return
    if is_record(expected):
        parts = parts_of(expected)
        if type(given) is not type(expected) or [*parts_of(given)] != [*parts]:
            raise WriteError(
                f"{where} takes a {_kind(expected)} with the fields {[*parts]}, and got {_kind(given)}. To change one "
                f"of them, write into it: `{where}.{next(iter(parts), 'field')}[:] = ...`."
            )
        for name, one in parts.items():
            check_fit(one, getattr(given, name), f"{where}.{name}")
        return
    if not _same(expected, given):
        raise WriteError(
            f"{where} holds {expected!r}, which is not a tensor and cannot be replaced or changed. What the model goes "
            "on with are tensors: edit those, here or at the ports of the modules around."
        )


def _same(expected: object, given: object) -> bool:
    """Whether what is no tensor is what it was."""
    if given is expected:
        return True
    if isinstance(expected, np.ndarray):
        return isinstance(given, np.ndarray) and given.dtype == expected.dtype and np.array_equal(expected, given)
    try:
        return bool(given == expected)
    except Exception:  # what comparing means is up to their classes
        return False


def describe(tensor: torch.Tensor) -> str:
    """``float32 [5, 576]``, with the device unless it is the CPU."""
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return named(tensor.shape, tensor.dtype) + device


def named(shape: torch.Size, dtype: torch.dtype) -> str:
    """``float32 [5, 576]``."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _kind(value: object) -> str:
    return describe(value) if isinstance(value, torch.Tensor) else type(value).__name__
