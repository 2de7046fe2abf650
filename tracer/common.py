"""Tensors that several invokes of a trace capture: kept once, and sent once.

A steering vector or the weights of a probe are usually captured by every invoke of a trace. Each of them gets its own
copy of the value, as of every variable; on the way there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from . import buffers
from .block import Payload, TensorBlob

if TYPE_CHECKING:
    import torch

_SMALL = 4096
"""Bytes below which a tensor goes with each block: a call of its own is not worth it."""


class Blobs:
    """Tensors as they are sent; those of the same content are the same object.

    The content decides, since a tensor may be changed in ways that torch does not count (through `.numpy()`).
    """

    def __init__(self) -> None:
        self._known: dict[TensorBlob, TensorBlob] = {}

    def of(self, tensor: torch.Tensor) -> TensorBlob:
        """A tensor as it is sent. Raises `Refusal`."""
        dtype, shape, array = buffers.elements(tensor)
        blob = TensorBlob(dtype, shape, array.tobytes())
        return self._known.setdefault(blob, blob)


def apart(payloads: Sequence[Payload]) -> tuple[list[Payload], tuple[TensorBlob, ...]]:
    """Take out of some payloads what several of them have in common.

    Returns:
        The payloads, which refer to it by index, and it.
    """
    found = {id(blob): blob for payload in payloads for blob in payload.tensors}
    times = Counter(key for payload in payloads for key in {id(blob) for blob in payload.tensors})
    common = [blob for key, blob in found.items() if times[key] > 1 and len(blob.data) >= _SMALL]
    if not common:
        return list(payloads), ()
    stand_ins = {id(blob): structs.replace(blob, data=b"", common=at) for at, blob in enumerate(common)}
    return [
        structs.replace(payload, tensors=tuple(stand_ins.get(id(blob), blob) for blob in payload.tensors))
        for payload in payloads
    ], tuple(common)


def together(tensors: Sequence[TensorBlob], common: Sequence[TensorBlob]) -> list[TensorBlob]:
    """The tensors of a payload, with those that were taken out of it."""
    return [blob if blob.common < 0 else common[blob.common] for blob in tensors]
