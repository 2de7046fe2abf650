"""What blocks hold on the GPU.

The allocator of torch tells what all tensors of the process have there, in some microseconds. So that is asked once
between two engine steps, and only when it has grown by as much as one block may hold are the blocks looked at
themselves: the tensors in their variables, in what they saved, and in containers and objects there. If only one
block runs, all that has grown is its. An allocation of more than there is fails at once, at the block's own line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Protocol

import torch

from ..envoy.errors import MemoryLimitError
from ..tracer.frames import release
from .memory import shown

if TYPE_CHECKING:
    from .mediator import Mediator

_ALL = 0.9
"""The share of what is available that all blocks may hold together; over it, the one that holds most is ended."""

_SAVE = "__invivo_save__"

_AGAIN = 1.125
"""How much more must be held for the blocks to be looked at again, where none was over its limit."""


class Device(Protocol):
    """A GPU's memory, in bytes."""

    def allocated(self) -> int:
        """What tensors of this process have."""
        ...

    def available(self) -> int:
        """What they can still have."""
        ...


class Cuda:
    """The memory of the current GPU."""

    def allocated(self) -> int:
        """See `Device`."""
        found: int = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"]
        return found

    def available(self) -> int:
        """See `Device`."""
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


class DeviceLimit:
    """The limit of each block.

    Args:
        limit: bytes, or below 1 a share of what is available while no block runs.
        device: the GPU.
        counts: whether a tensor is there.
    """

    def __init__(
        self, limit: float, device: Device, counts: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda
    ) -> None:
        self._limit = limit
        self._device = device
        self._counts = counts
        self._base = 0
        self._most = self._all = self._look = 0.0

    def begin(self) -> None:
        """A block comes, and no other one is there."""
        available = self._device.available()
        self._base = self._device.allocated()
        self._most = self._limit if self._limit >= 1 else self._limit * available
        self._all = _ALL * available
        self._look = min(self._most, self._all)

    def over(self, blocks: Mapping[str, Mediator]) -> dict[str, MemoryLimitError]:
        """The blocks that hold too much, with their errors."""
        grown = self._device.allocated() - self._base
        if grown <= self._look:
            return {}
        held = {name: held_by(block, self._counts) for name, block in blocks.items() if not block.done}
        if len(held) == 1:
            held = dict.fromkeys(held, grown)  # a list that is being made is in no variable yet
        found = {name: self._error(size) for name, size in held.items() if size > self._most}
        if not found and grown > self._all and any(held.values()):
            name = max(held, key=lambda name: held[name])
            found = {name: self._error(held[name])}
        if not found:
            self._look = grown * _AGAIN
        return found

    def _error(self, size: int) -> MemoryLimitError:
        others = "" if size > self._most else f", with other blocks that hold {shown(self._all - size)} and more"
        return MemoryLimitError(
            f"the block holds {shown(size)} of the GPU's memory, and the limit is {shown(self._most)}{others}. Keep "
            "less of what it reads and computes there (a row, a mean, `.cpu()`), or make the model with a higher "
            "`memory_limit`."
        )


def held_by(block: Mediator, counts: Callable[[torch.Tensor], bool]) -> int:
    """Bytes of the tensors that a waiting block holds, each storage once and whole."""
    values: list[object] = [entry.value for entry in block.saved]
    frame: FrameType | None = block.frame
    while frame is not None:
        scope = frame.f_locals
        values += scope.values()
        if _SAVE in frame.f_globals:  # the namespace of the block, and no module's
            values += frame.f_globals.values()
        release(frame, scope)
        frame = frame.f_back
    return _bytes_of(values, counts)


def _bytes_of(values: Iterable[object], counts: Callable[[torch.Tensor], bool]) -> int:
    todo, seen, storages, total = [*values], set[int](), set[int](), 0
    while todo:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            if counts(item) and item.layout is torch.strided:
                storage = item.untyped_storage()
                if storage.data_ptr() not in storages:
                    storages.add(storage.data_ptr())
                    total += storage.nbytes()
        elif id(item) not in seen:
            seen.add(id(item))
            todo += _inside(item)
    return total


def _inside(item: object) -> Iterable[object]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset | deque):
        return item
    if isinstance(item, type | ModuleType | FunctionType) or type(item).__module__.partition(".")[0] in _NOT_THEIRS:
        return ()
    own = getattr(item, "__dict__", None)
    return own.values() if isinstance(own, dict) else ()


_NOT_THEIRS = frozenset((__name__.partition(".")[0], "torch", "vllm"))
"""Packages whose objects may lead to the model's own tensors."""
