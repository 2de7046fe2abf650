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
from typing import Any, TypeAlias

import numpy as np
import torch

from ..envoy.errors import MisuseError
from ..tracer.effects import MODES, PRINTS, TORCH
from .generator import SEAT, Stream
from .torch_compat import (
    autocast_on,
    default_dtype,
    dispatch_modes,
    function_modes,
    grad_on,
    inference_on,
    leave_modes,
    set_grad_enabled,
)

State: TypeAlias = "tuple[bool, torch.dtype]"
"""Gradient mode and default dtype, which also a block depends on that touches nothing of torch's state."""


def state() -> State:
    """What they are now."""
    return grad_on(), default_dtype()


class Turns:
    """The torch state of one block, and of the engine around it.

    `begin` and `end` are called by the engine's side around each turn, unless it is `light`, and `check` by the block
    before it hands over, if it is `checked`. Torch's generator stays the block's after a turn, until the hub gives it
    back (`SEAT.leave`).

    Args:
        seed: where the block's random numbers start.
        printed: takes what the block prints; None lets it out as usual.
        uses: what the block may touch (`tracer.effects`, and ``"random"``, ``"numpy"``).

    Attributes:
        checked: the block may have entered a mode in its turn.
    """

    def __init__(self, seed: int, printed: io.StringIO | None, uses: Collection[str] = (TORCH, MODES, PRINTS)) -> None:
        self._random = Stream(seed)
        self._draws = TORCH in uses
        self.checked = MODES in uses
        self._grad = self._engine_grad = grad_on()
        self._dtype = self._engine_dtype = default_dtype()
        self._printed = printed if PRINTS in uses else None
        self._stdout = sys.stdout
        self._stacked = (False, 0, 0, False)
        self._others = [_OTHERS[name](seed) for name in uses if name in _OTHERS]
        self._simple = not (self._draws or self.checked or self._others or self._printed is not None)

    def light(self, now: State) -> bool:
        """Whether the block touches nothing of the state, and what it depends on is as it was when the block came."""
        return self._simple and self._grad is now[0] and self._dtype is now[1]

    def begin(self) -> None:
        """Put the engine's state aside and bring in the block's."""
        self._engine_grad, self._engine_dtype = grad_on(), default_dtype()
        if self.checked:
            self._stacked = _stacked_modes()
        if self._draws:
            self.sit()
        if self._grad is not self._engine_grad:
            set_grad_enabled(self._grad)
        if self._dtype is not self._engine_dtype:
            torch.set_default_dtype(self._dtype)
        if self._others:
            self._swap()
        if self._printed is not None:
            self._stdout, sys.stdout = sys.stdout, self._printed

    def end(self, *, over: bool) -> None:
        """Put the block's state aside and bring back the engine's.

        Args:
            over: the block has ended, maybe inside of a mode; one that goes on has passed `check`.
        """
        if over and self.checked:
            leave_modes(*self._stacked)
        self._grad = grad_on()
        self._dtype = default_dtype()
        if self._grad is not self._engine_grad:
            set_grad_enabled(self._engine_grad)
        if self._dtype is not self._engine_dtype:
            torch.set_default_dtype(self._engine_dtype)
        if self._others:
            self._swap()
        if self._printed is not None:
            sys.stdout = self._stdout

    def sit(self) -> None:
        """Have torch draw the block's random numbers."""
        if SEAT.taken is not self._random:
            SEAT.take(self._random)

    def _swap(self) -> None:
        for source in self._others:
            source.swap()

    def check(self) -> None:
        """Refuse to hand over with a stacked mode open.

        Raises:
            MisuseError: a mode was entered in this turn and not left.
        """
        if _stacked_modes() != self._stacked:
            raise MisuseError(
                "a port was asked for inside a torch mode (`inference_mode(...)`, `autocast`, `torch.device(...)`, "
                "...) that the block opened. The model would run under it, so leave it first: read the port, then open "
                "the mode around your own computation."
            )


def _stacked_modes() -> tuple[bool, int, int, bool]:
    return inference_on(), function_modes(), dispatch_modes(), autocast_on()


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
