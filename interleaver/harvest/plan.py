"""What a harvest takes of each prompt and where it puts it: told to the model's process once, when it begins."""

from __future__ import annotations

from math import prod
from typing import Literal, TypeAlias

import msgspec
import torch

from ...envoy.errors import MisuseError
from .ports import Choice

Positions: TypeAlias = "Literal['all', 'last'] | slice"
"""Which tokens of a prompt have rows."""

DTYPES = ("float32", "float16", "bfloat16")


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a shard: a row per token.

    Attributes:
        name: its name there.
        dtype: torch's name of the dtype.
        shape: of one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * self.torch_dtype.itemsize


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One harvest.

    Attributes:
        run: a name for this run of it.
        folder: where the shards go.
        choices: the ports in the order in which they fire.
        columns: the tensors that they make.
        chosen: the tokens of a prompt that have rows, as start, stop and step of a slice.
        generate: the number of generated tokens that have rows as well.
        capacity: rows that a shard has room for.
    """

    run: str
    folder: str
    choices: tuple[Choice, ...]
    columns: tuple[Column, ...]
    chosen: tuple[int | None, int | None, int | None]
    generate: int
    capacity: int

    @property
    def rows(self) -> slice:
        """`chosen` as a slice."""
        return slice(*self.chosen)


def row_bytes(columns: tuple[Column, ...]) -> int:
    """Bytes of one row of all columns, with what tells whose it is."""
    return sum(column.row_bytes for column in columns) + 16


def chosen(positions: object) -> slice:
    """The tokens of a prompt that have rows, as a slice.

    Raises:
        MisuseError: neither ``"all"`` nor ``"last"`` nor a slice with a positive step.
    """
    if positions == "all":
        return slice(None)
    if positions == "last":
        return slice(-1, None)
    if isinstance(positions, slice) and (positions.step is None or positions.step > 0):
        return positions
    raise MisuseError(
        f"`positions={positions!r}`: it is 'all', 'last', or a slice of the prompt's tokens such as `slice(1, None)`."
    )


def wanted_dtype(dtype: object) -> str | None:
    """Torch's name of the dtype in which activations are stored; None for the model's own.

    Raises:
        MisuseError: another one than float32, float16 and bfloat16.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise MisuseError(f"`dtype={dtype!r}`: activations are stored as {', '.join(DTYPES)}, or None as they are.")
    return name
