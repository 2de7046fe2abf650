"""Tensors as raw bytes: the one way in which tensors leave and enter a process.

A tensor is its dtype's name, its shape and its elements in row-major, little-endian order. Everything else it
may carry (device, strides, autograd history, being an inference tensor) stays behind: the receiver gets a
plain tensor that owns its memory, may be written to, and takes no part in autograd.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch

DTYPES = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"}
    | {"float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Names of the dtypes that travel, without the ``torch.`` prefix."""


class Refusal(Exception):
    """Why a value cannot be turned into bytes; callers add the variable's name and raise their own error."""


def is_away(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a device."""
    return tensor.device.type != "cpu"


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor, without importing torch: there is none where torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class OnDevice:
    """The elements of a tensor that are still on its device.

    Attributes:
        bytes: they, as one row of bytes. It may share the tensor's memory.
    """

    __slots__ = ("bytes",)

    def __init__(self, plain: torch.Tensor) -> None:
        import torch

        _check_size(plain.nbytes)
        self.bytes = plain.contiguous().reshape(-1).view(torch.uint8)

    def __len__(self) -> int:
        return self.bytes.numel()


Piece = memoryview | OnDevice
"""The elements of one tensor or array, as flat bytes."""

_LARGEST = 2**32 - 1
_AT_ONCE = 16 << 20
"""What is brought home in one copy: it is put together on the device before, which takes as much memory again."""


def at_home(pieces: Sequence[Piece]) -> list[memoryview]:
    """Bring what is on a device to the host: small pieces in one copy, as each waits for the device."""
    away = [piece.bytes for piece in pieces if isinstance(piece, OnDevice)]
    if not away:
        return [piece for piece in pieces if isinstance(piece, memoryview)]
    import torch

    alike = len({part.device for part in away}) == 1 and sum(part.numel() for part in away) <= _AT_ONCE
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if len(away) > 1 and alike:
            back = iter(torch.cat(away).cpu().split_with_sizes([part.numel() for part in away]))
        else:
            back = iter(tuple(part.cpu() for part in away))
    return [flat(next(back).numpy()) if isinstance(piece, OnDevice) else piece for piece in pieces]


def flat(array: np.ndarray[Any, Any]) -> memoryview:
    """The elements of an array as flat bytes, without a copy where they are in one row.

    Raises:
        Refusal: they are too many.
    """
    _check_size(array.nbytes)
    whole = array if array.flags.c_contiguous else array.copy()
    rows: Any = whole.reshape(-1).view("u1") if array.size else b""
    return memoryview(rows).toreadonly()


def _check_size(nbytes: int) -> None:
    if nbytes > _LARGEST:
        raise Refusal("it has 4 GiB or more; save it in parts")


def bare(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The name of a tensor's dtype, and the tensor with nothing but its elements, on its device.

    Raises:
        Refusal: it has no plain elements (sparse, quantized, meta, nested, a wrapper subclass).
    """
    import torch

    kind = type(tensor)
    if getattr(kind, "__torch_dispatch__") is not getattr(torch.Tensor, "__torch_dispatch__"):  # noqa: B009
        raise Refusal(f"a {kind.__name__} wraps other tensors; take the plain tensor out of it first")
    if tensor.is_meta:
        raise Refusal("a meta tensor has a shape but no values")
    if tensor.is_nested:
        raise Refusal("a nested tensor; use `.unbind()` and a list of plain tensors")
    if tensor.layout is not torch.strided:
        raise Refusal(f"a tensor of layout {tensor.layout}; use `.to_dense()`")
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        raise Refusal(f"a quantized tensor ({name}); use `.dequantize()`")
    if name not in DTYPES:
        raise Refusal(f"a tensor of dtype {name}")
    if tensor.untyped_storage().nbytes() < _reach(tensor) * tensor.element_size():
        raise Refusal("a tensor whose memory was given back (`storage.resize_`)")
    with torch._C.DisableTorchFunction():
        plain = tensor.detach()
        if plain.is_conj():
            plain = plain.resolve_conj()
        if plain.is_neg():
            plain = plain.resolve_neg()
    return name, plain


def elements(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """Reads a tensor of any device, strides and dtype of `DTYPES`.

    Returns:
        The dtype's name, the shape, and a numpy array of that shape with the same bits. The array shares the
        tensor's memory if that is on the CPU; its own dtype is an integer of the same width, and it need not
        be contiguous.

    Raises:
        Refusal: see `bare`.
    """
    name, plain = bare(tensor)
    return name, tuple(tensor.shape), _numbers(plain)


def piece(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], Piece]:
    """As `elements`, with the elements as flat bytes, which stay on the tensor's device.

    Raises:
        Refusal: see `bare`; or it is too large.
    """
    name, plain = bare(tensor)
    if is_away(plain):
        return name, tuple(tensor.shape), OnDevice(plain)
    return name, tuple(tensor.shape), flat(_numbers(plain))


def _numbers(plain: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    with torch._C.DisableTorchFunction():
        plain = plain.cpu()
        size = plain.element_size()
        if size < 16:
            plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        return plain.numpy()


def _reach(tensor: torch.Tensor) -> int:
    """Elements of its storage up to the last one that a tensor has."""
    count = tensor.numel()
    if not count or tensor.is_contiguous():
        return int(tensor.storage_offset()) + count if count else 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return int(tensor.storage_offset()) + int(last) + 1


def tensor(
    dtype: str, shape: tuple[int, ...], data: bytes | memoryview, device: torch.device | None = None
) -> torch.Tensor:
    """Makes a tensor from what `elements` read.

    Read-only bytes are copied; a writable view becomes the tensor's memory, which keeps the view alive. The tensor
    is a normal one (not an inference tensor) even if an inference mode is on.

    Raises:
        ValueError: the dtype is unknown, or shape and number of bytes do not agree.
    """
    import torch

    kind = getattr(torch, dtype, None) if dtype in DTYPES else None
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"no dtype {dtype!r}")
    if any(size < 0 for size in shape) or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not make a {dtype} tensor of shape {list(shape)}")
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return tensor(dtype, shape, data, device)
    with torch._C.DisableTorchFunction():
        if len(data):
            own = bytearray(data) if isinstance(data, bytes) or data.readonly else data
            made = torch.frombuffer(own, dtype=kind).view(shape)
        else:
            made = torch.empty(0, dtype=torch.uint8, device="cpu").view(kind).view(shape)
        return made if device is None or device.type == "cpu" else made.to(device)
