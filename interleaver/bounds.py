"""Whole numbers that a model looks up in tables: token ids and positions.

A kernel that is given a number behind the end of its table reads what is there, ends the process, or leaves the GPU
unusable for it, with everybody's requests. So blocks cannot put such numbers there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..envoy.address import Port
from ..envoy.errors import WriteError


def tables(model: torch.nn.Module) -> dict[str, int]:
    """The embeddings of a model by address, and how many rows their tables have.

    They say it themselves (`num_embeddings`; of vLLM's vocabulary, whose table is padded, `org_vocab_size`).
    """
    found = {}
    for address, module in model.named_modules(remove_duplicate=False):
        rows = getattr(module, "org_vocab_size", getattr(module, "num_embeddings", None))
        if isinstance(rows, int):
            found[address] = rows
    return found


class Bounds:
    """What blocks may put in place of whole numbers at the ports of a model's modules.

    Args:
        rows: how many rows the model's tables have (`tables`).
        longest: the number of positions.
    """

    def __init__(self, rows: Mapping[str, int], longest: int) -> None:
        self._longest = longest
        self._rows = rows

    def check(self, port: Port, changed: Sequence[torch.Tensor | None]) -> None:
        """See to what a block has put in place of the tensors of a port, None for untouched ones.

        Raises:
            WriteError: there is a number that the model cannot look up.
        """
        first = True  # of the whole numbers: a module around the embedding takes token ids before positions
        for tensor in changed:
            if tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
                continue
            limit = self._limit(port.address, ids=first)
            first = False
            if bool(((tensor < 0) | (tensor >= limit)).any()):
                raise WriteError(
                    f"{port} takes whole numbers from 0 to {limit - 1} here, which the model looks up in a table "
                    f"(token ids, positions), and the block has put {int(tensor.min())} to {int(tensor.max())} there."
                )

    def _limit(self, address: str, *, ids: bool) -> int:
        rows = self._rows.get(address)
        if rows is not None:
            return rows
        inside = [rows for other, rows in self._rows.items() if not address or other.startswith(f"{address}.")]
        return max(inside) if ids and inside else self._longest
