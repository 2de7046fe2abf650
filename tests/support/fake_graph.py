"""A CUDA graph for machines without CUDA: what torch was asked for while it was captured is done again, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class FakeGraph:
    """As `torch.cuda.CUDAGraph`, except that what is captured is also done."""

    made = 0

    def __init__(self) -> None:
        FakeGraph.made += 1
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._mode = _Recording(self._calls)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "") -> None:
        self._mode.__enter__()

    def capture_end(self) -> None:
        self._mode.__exit__(None, None, None)

    def replay(self) -> None:
        for function, args, kwargs, outputs in self._calls:
            found, _ = tree_flatten(function(*args, **kwargs))
            for new, old in zip(found, tree_flatten(outputs)[0], strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Callable[..., Any], Any, Any, Any]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, outputs))
        return outputs
