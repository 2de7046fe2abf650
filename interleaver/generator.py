"""Whose random numbers torch's generators draw.

The generators, one for the CPU and one for each GPU, are the process's, so a block that has its own random numbers
takes a seat on them, and the engine gets them back. Changing seats copies five kilobytes twice, more than all else at a
port. Most models draw nothing while they compute, so a block may keep its seat from one port of a forward to the next;
whoever could draw then is put in first.
"""

from __future__ import annotations

from operator import attrgetter

import torch


def defaults() -> list[torch.Generator]:
    """Torch's generators that are drawn from if none is named: the CPU's, and the current GPU's once CUDA is in use."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def states() -> list[bytes]:
    """Where these generators are."""
    return [generator.get_state().numpy().tobytes() for generator in defaults()]


class Stream:
    """The random numbers of one block: the states of the generators, while they are not the ones in use.

    Args:
        seed: where they start.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[int, torch.Tensor] = {}

    def put_aside(self, number: int, generator: torch.Generator) -> None:
        """Note where a generator is; `number` is its place among `defaults`."""
        self._states[number] = generator.get_state()

    def bring(self, number: int, generator: torch.Generator) -> None:
        """Have a generator go on where it was put aside."""
        state = self._states.get(number)
        if state is None:
            state = torch.Generator(generator.device).manual_seed(self._seed).get_state()
        generator.set_state(state)


class Seat:
    """Torch's generators.

    Attributes:
        taken: the block's stream that they draw; None if they draw the engine's.
    """

    def __init__(self) -> None:
        self.taken: Stream | None = None
        self._engine: list[tuple[torch.Generator, torch.Tensor]] = []

    def take(self, stream: Stream) -> None:
        """Have torch draw the block's random numbers from now on."""
        if self.taken is None:
            self._engine = [(generator, generator.get_state()) for generator in defaults()]
        for number, (generator, _) in enumerate(self._engine):
            if self.taken is not None:
                self.taken.put_aside(number, generator)
            stream.bring(number, generator)
        self.taken = stream

    def leave(self) -> None:
        """Have torch draw the engine's random numbers again."""
        if self.taken is None:
            return
        for number, (generator, state) in enumerate(self._engine):
            self.taken.put_aside(number, generator)
            generator.set_state(state)
        self.taken, self._engine = None, []


SEAT = Seat()
"""The one seat of the process."""


class Draws:
    """Whether the forward of a model draws random numbers of its own.

    Args:
        model: the model.

    Attributes:
        may: it may, as far as is known: if it did when it was watched, or some of its modules are in training.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [*model.modules()]
        self._drew = self.may = True
        self._before: list[bytes] | None = None

    def look(self) -> None:
        """Modules may have been put into training, or out of it."""
        self.may = self._drew or any(map(_training, self._modules))

    def watch(self) -> None:
        """A forward begins that is to be watched."""
        self._before = states()

    def see(self) -> None:
        """If one was watched, it is over."""
        if self._before is not None:
            self._drew, self._before = self._before != states(), None
            self.look()

    def forget(self) -> None:
        """The forward that was watched has failed."""
        self._before = None


_training = attrgetter("training")
