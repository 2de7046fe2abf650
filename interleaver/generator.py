"""Whose random numbers torch's generator draws.

The generator is one for the process, so a block that has its own random numbers takes a seat on it, and the engine gets
it back. Changing seats copies five kilobytes twice, more than all else at a port. Most models draw nothing while they
compute, so a block may keep its seat from one port of a forward to the next; whoever could draw then is put in first.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch


class Stream:
    """The random numbers of one block: the state of a generator, while it is not the one in use.

    Args:
        seed: where they start.
    """

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()


class Seat:
    """Torch's generator on the CPU.

    Attributes:
        taken: the block's stream that it draws; None if it draws the engine's.
    """

    def __init__(self) -> None:
        self.taken: Stream | None = None
        self._engine: torch.Tensor | None = None

    def take(self, stream: Stream) -> None:
        """Have torch draw the block's random numbers from now on."""
        state = torch.default_generator.get_state()
        if self.taken is None:
            self._engine = state
        else:
            self.taken.state = state
        torch.default_generator.set_state(stream.state)
        self.taken = stream

    def leave(self) -> None:
        """Have torch draw the engine's random numbers again."""
        if self.taken is None:
            return
        assert self._engine is not None, "it was put aside when the seat was taken"
        self.taken.state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._engine)
        self.taken = self._engine = None


SEAT = Seat()
"""The one seat of the process."""


def draws(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a forward of these modules may draw random numbers, as far as torch can tell: some are in training."""
    return any(map(_training, modules))


_training = attrgetter("training")
