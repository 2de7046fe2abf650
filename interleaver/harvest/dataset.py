"""`Activations`: what a harvest has written, as a torch data set of rows."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, TypeAlias

import torch
from safetensors import safe_open
from torch.utils.data import Dataset

from ...envoy.errors import MisuseError
from .manifest import Manifest, load, tables

_OF_ROW = ("prompt", "token_id", "position")


Row: TypeAlias = "dict[str, torch.Tensor]"
"""What is known of one token, or of several with their values stacked."""


class Activations(Dataset[dict[str, torch.Tensor]]):
    """The rows of a harvest, one for each token: a `torch.utils.data.Dataset`.

    ``rows[i]`` is a dict of tensors: one for each column (``rows.columns``), with ``token_id``, ``position`` and
    ``prompt`` (the number of the prompt). ``rows[a:b]`` and ``rows[[1, 5, 7]]`` are the same with the rows of several
    tokens stacked. The files are mapped into memory, so a data set may be larger than that, and workers of a
    `DataLoader` share what they read.

    Rows are in the order in which the model computed them, those of one prompt together.

    Args:
        folder: where the harvest is; one that is not complete gives what it has.
        columns: names of the columns to read; all of them if None.

    Raises:
        MisuseError: there is no harvest, or a column that it does not have.

    Attributes:
        manifest: what was harvested.
        columns: names of the columns.
    """

    def __init__(self, folder: str | Path, columns: Sequence[str] | None = None) -> None:
        self.folder = Path(folder)
        manifest = load(self.folder) if self.folder.is_dir() else None
        if manifest is None:
            raise MisuseError(f"{self.folder} has no harvest: no manifest.json is there.")
        self.manifest: Manifest = manifest
        known = [column.name for column in manifest.columns]
        self.columns = known if columns is None else list(columns)
        unknown = [name for name in self.columns if name not in known]
        if unknown:
            raise MisuseError(f"the harvest has no column {unknown[0]!r}. It has: {', '.join(known)}.")
        self._files: list[str] = []
        self._prompts: dict[int, tuple[int, int]] = {}
        counts = [0]
        for table in tables(self.folder):
            ends = [*table.starts[1:], table.rows]
            for number, start, end in zip(table.numbers, table.starts, ends, strict=True):
                self._prompts[number] = counts[-1] + start, counts[-1] + end
            self._files.append(table.file)
            counts.append(counts[-1] + table.rows)
        self._counts = counts
        self._open: dict[int, dict[str, torch.Tensor]] = {}

    def __len__(self) -> int:
        return self._counts[-1]

    def __getitem__(self, index: SupportsIndex | slice | Iterable[SupportsIndex] | torch.Tensor) -> Row:
        if isinstance(index, slice):
            return self._range(*index.indices(len(self)))
        where: Any = index.tolist() if isinstance(index, torch.Tensor) else index
        if isinstance(where, Iterable):
            return self._gathered([operator.index(at) for at in where])
        shard, row = self._place(operator.index(where))
        return {name: tensor[row] for name, tensor in self._shard(shard).items()}

    @property
    def prompts(self) -> list[int]:
        """Numbers of the prompts that have rows, in order."""
        return sorted(self._prompts)

    def of_prompt(self, number: int) -> Row:
        """The rows of one prompt.

        Raises:
            MisuseError: it has none.
        """
        found = self._prompts.get(number)
        if found is None:
            raise MisuseError(f"the harvest has no rows of prompt {number} of {self.manifest.prompts}.")
        return self[found[0] : found[1]]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def _place(self, index: int) -> tuple[int, int]:
        """Number of the shard and row in it."""
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"row {index} of {count}")
        index %= count
        shard = bisect_right(self._counts, index) - 1
        return shard, index - self._counts[shard]

    def _shard(self, number: int) -> Row:
        """Its tensors, which are views of the file."""
        found = self._open.get(number)
        if found is None:
            with safe_open(self.folder / self._files[number], "pt") as file:
                found = {name: file.get_tensor(name) for name in (*self.columns, *_OF_ROW)}
            self._open[number] = found
        return found

    def _range(self, start: int, stop: int, step: int) -> Row:
        if step != 1 or start >= stop:
            return self._gathered(list(range(start, stop, step)))
        first, last = self._place(start)[0], self._place(stop - 1)[0]
        parts = []
        for number in range(first, last + 1):
            base = self._counts[number]
            low, high = max(start - base, 0), min(stop - base, self._counts[number + 1] - base)
            parts.append({name: tensor[low:high] for name, tensor in self._shard(number).items()})
        return {name: torch.cat([part[name] for part in parts]) for name in (*self.columns, *_OF_ROW)}

    def _gathered(self, indices: list[int]) -> Row:
        """Rows in any order: shard by shard, so that each is asked once."""
        by_shard: dict[int, tuple[list[int], list[int]]] = {}
        for at, index in enumerate(indices):
            number, row = self._place(index)
            ats, rows = by_shard.setdefault(number, ([], []))
            ats.append(at)
            rows.append(row)
        if not by_shard:
            return self._nothing()
        found: dict[str, torch.Tensor] = {}
        for number, (ats, rows) in by_shard.items():
            for name, tensor in self._shard(number).items():
                if name not in found:
                    found[name] = tensor.new_empty((len(indices), *tensor.shape[1:]))
                found[name][torch.tensor(ats)] = tensor[torch.tensor(rows)]
        return found

    def _nothing(self) -> Row:
        columns = [column for column in self.manifest.columns if column.name in self.columns]
        found = {column.name: torch.empty((0, *column.shape), dtype=column.torch_dtype) for column in columns}
        dtypes = {"prompt": torch.int64, "token_id": torch.int32, "position": torch.int32}
        return found | {name: torch.empty(0, dtype=dtype) for name, dtype in dtypes.items()}
