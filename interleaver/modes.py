"""A block's turn on the model's thread must leave torch as it found it.

Gradient mode, default dtype and the random states that it uses are the block's own: they are put aside when it hands
over, and are back at its next turn. Modes that torch keeps on a stack (inference mode, device contexts, function and
dispatch modes, autocast) cannot be put aside, so asking for a port inside of one is refused, and those that a block
has not left when it ends are left for it.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ..envoy.errors import MisuseError
from .generator import SEAT, Stream
from .torch_compat import autocast_on, dispatch_modes, function_modes, inference_on, leave_modes, set_grad_enabled


class Turns:
    """The torch state of one block, and of the engine around it.

    `begin` and `end` are called by the engine's side around each turn, `check` by the block before it hands over.
    Torch's generator stays the block's after a turn, until the hub gives it back (`SEAT.leave`).

    Args:
        seed: where the block's random numbers start.
        printed: takes what the block prints; None lets it out as usual.
        uses: other random sources than torch that the block refers to, ``"random"`` and ``"numpy"``.
    """

    def __init__(self, seed: int, printed: io.StringIO | None, uses: Collection[str] = ()) -> None:
        self._random = Stream(seed)
        self._grad = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()
        self._printed = printed
        self._outside = (self._grad, self._dtype, sys.stdout)
        self._entered: tuple[bool, int, int, bool] | None = None
        self._others = [_OTHERS[name](seed) for name in uses]

    def begin(self) -> None:
        """Put the engine's state aside and bring in the block's."""
        grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._outside = (grad, dtype, sys.stdout)
        self._entered = (inference_on(), function_modes(), dispatch_modes(), autocast_on())
        if SEAT.taken is not self._random:
            SEAT.take(self._random)
        if self._grad != grad:
            set_grad_enabled(self._grad)
        if self._dtype != dtype:
            torch.set_default_dtype(self._dtype)
        for source in self._others:
            source.swap()
        if self._printed is not None:
            sys.stdout = self._printed

    def end(self, *, over: bool) -> None:
        """Put the block's state aside and bring back the engine's.

        Args:
            over: the block has ended, maybe inside of a mode; one that goes on has passed `check`.
        """
        if over and self._entered is not None:
            leave_modes(*self._entered)
        grad, dtype, stdout = self._outside
        self._grad = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()
        if self._grad != grad:
            set_grad_enabled(grad)
        if self._dtype != dtype:
            torch.set_default_dtype(dtype)
        for source in self._others:
            source.swap()
        if self._printed is not None:
            sys.stdout = stdout

    def check(self) -> None:
        """Refuse to hand over with a stacked mode open.

        Raises:
            MisuseError: a mode was entered in this turn and not left.
        """
        if (inference_on(), function_modes(), dispatch_modes(), autocast_on()) != self._entered:
            raise MisuseError(
                "a port was asked for inside a torch mode (`inference_mode(...)`, `autocast`, `torch.device(...)`, "
                "...) that the block opened. The model would run under it, so leave it first: read the port, then open "
                "the mode around your own computation."
            )


class _PythonRandom:
    """The state of the module `random`, the block's or the engine's, whichever is not in use."""

    def __init__(self, seed: int) -> None:
        self._aside = random.Random(seed).getstate()

    def swap(self) -> None:
        """Exchange the state in use with the one put aside."""
        current = random.getstate()
        random.setstate(self._aside)
        self._aside = current


class _NumpyRandom:
    """The same for numpy's module-level generator."""

    def __init__(self, seed: int) -> None:
        self._aside: Any = np.random.RandomState(seed % 2**32).get_state()

    def swap(self) -> None:
        """Exchange the state in use with the one put aside."""
        current = np.random.get_state()
        np.random.set_state(self._aside)
        self._aside = current


_OTHERS: dict[str, type[_PythonRandom | _NumpyRandom]] = {"random": _PythonRandom, "numpy": _NumpyRandom}
