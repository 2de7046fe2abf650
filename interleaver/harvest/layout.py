"""The layout of a safetensors file, written straight from memory.

https://github.com/huggingface/safetensors#format: eight bytes with the length of the header, the header in JSON, and
the tensors' elements one after the other. `safetensors.torch.save_file` would do the same with a copy of everything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SLICE = 8 << 20
"""Bytes handed to the system at once: other threads of the process get their turn between two."""


def storable(dtype: torch.dtype) -> bool:
    """Whether the format has a name for the dtype."""
    return dtype in _NAMES


def write(path: str, tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]) -> int:
    """Write a new file; returns its size.

    Args:
        path: of the file.
        tensors: by name, in pieces of rows: contiguous and on the CPU.
        metadata: of the file.
    """
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].element_size())
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, pieces in ordered:
        end = place + sum(piece.nbytes for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        entries[name] = {"dtype": _NAMES[pieces[0].dtype], "shape": shape, "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(file, memoryview(len(header).to_bytes(8, "little") + header))
        for _, pieces in ordered:
            for piece in pieces:
                array: Any = piece.reshape(-1).view(torch.uint8).numpy()
                _write(file, memoryview(array))
    finally:
        os.close(file)
    return 8 + len(header) + place


def _write(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data[:_SLICE]) :]
