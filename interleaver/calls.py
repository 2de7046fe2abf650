"""Calls of the model's modules that are no part of its forward, so that no port fires in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..envoy.address import INPUT, port_at
from .bounds import Bounds
from .structure import map_tensors, tensors_of

ModuleCall = Callable[[torch.nn.Module, "tuple[object, ...]", "dict[str, object]"], object]


class Calls:
    """Calls of modules by blocks, and by whoever runs a forward that is none of theirs.

    Args:
        module: gives the module at an address.
        call: how to call one, where that is not ``module(*args, **kwargs)``.

    Attributes:
        inside: such a call is running.
        bounds: of whole numbers that blocks may put at ports; None where they can hurt nobody else.
    """

    def __init__(self, module: Callable[[str], torch.nn.Module], call: ModuleCall | None = None) -> None:
        self.inside = False
        self.bounds: Bounds | None = None
        self._module = module
        self._call = call or (lambda module, args, kwargs: module(*args, **kwargs))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Modules that run in this context are none of the blocks' business."""
        inside, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = inside

    def call(self, address: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a module for a block, on copies.

        Raises:
            WriteError: it is called with a number that it cannot look up.
        """
        if self.bounds is not None:
            self.bounds.check(port_at(address, INPUT), tensors_of((args, kwargs)))
        with self.aside():
            copies = map_tensors((args, kwargs), torch.Tensor.clone)
            return self._call(self._module(address), *copies)  # type: ignore[misc]
