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


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor, without importing torch: there is none where torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def elements(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """Reads a tensor of any device, strides and dtype of `DTYPES`.

    Returns:
        The dtype's name, the shape, and a numpy array of that shape with the same bits. The array shares the
        tensor's memory if that is on the CPU; its own dtype is an integer of the same width, and it need not
        be contiguous.

    Raises:
        Refusal: the tensor has no plain elements (sparse, quantized, meta, nested, a wrapper subclass).
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
        if plain.device.type != "cpu":
            plain = plain.cpu()
        if plain.is_conj():
            plain = plain.resolve_conj()
        if plain.is_neg():
            plain = plain.resolve_neg()
        size = plain.element_size()
        if size < 16:
            plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        return name, tuple(tensor.shape), plain.numpy()


def _reach(tensor: torch.Tensor) -> int:
    """Elements of its storage up to the last one that a tensor has."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return int(tensor.storage_offset()) + int(last) + 1 if tensor.numel() else 0


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
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        if len(data):
            own = bytearray(data) if isinstance(data, bytes) or data.readonly else data
            made = torch.frombuffer(own, dtype=kind).view(shape)
        else:
            made = torch.empty(0, dtype=torch.uint8, device="cpu").view(kind).view(shape)
        return made if device is None or device.type == "cpu" else made.to(device)
