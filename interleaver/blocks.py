"""The blocks that run on one model, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

from ..envoy.errors import InternalError
from .generator import SEAT
from .waits import BarrierWait, StepWait

if TYPE_CHECKING:
    from ..envoy.address import Port
    from .mediator import Mediator


class Blocks:
    """What an engine asks about them.

    Attributes:
        mediators: the blocks by request.
        ended: requests whose block ended them (by an exception or `stop`) and that the engine has yet to end.
        edited: requests whose block changed what the model computes; the engine takes them out once they are gone.
        streams: some of the blocks may stream.
        lagging: the step that runs is kept for the blocks, which have their turns later (`LaggingHub`).
    """

    streams = lagging = False

    def __init__(self) -> None:
        self.mediators: dict[str, Mediator] = {}
        self.ended: set[str] = set()
        self.edited: set[str] = set()
        self._meeting: dict[str, Mediator] = {}  # those that may come to barriers
        self._done: set[str] = set()
        self._waiting: dict[Port, list[Mediator]] = {}

    @property
    def held(self) -> frozenset[str]:
        """Requests whose block waits at a barrier: the engine must not go on with them."""
        return frozenset(key for key, mediator in self._meeting.items() if isinstance(mediator.wait, BarrierWait))

    def take_done(self) -> frozenset[str]:
        """Requests that go on, and whose blocks have come to need no more steps since this was last asked."""
        done, self._done = frozenset(self._done), set()
        return done

    @property
    def has_news(self) -> bool:
        """Whether there may be something to tell the engine with the step that is over: most go by without."""
        return bool(self.ended or self._done or self._meeting or self.streams)

    def about_to_begin(self, request: str, step: int | None) -> Mediator | None:
        """The block of a request, if it waits for this step."""
        mediator = self.mediators.get(request)
        wait = mediator.wait if mediator is not None else None
        return mediator if isinstance(wait, StepWait) and wait.step == step else None

    @property
    def needs_modules(self) -> bool:
        """Whether a block waits for a module in this step. If not, the forward may run without hooks."""
        return any(not port.of_step for port in self._waiting)

    @property
    def wanted(self) -> list[Port]:
        """Ports of modules that blocks wait for."""
        return [port for port in self._waiting if not port.of_step]

    def waited_for(self, port: Port) -> bool:
        """Whether a block waits for a port."""
        return port in self._waiting

    def give_up(self, error: Exception) -> None:
        """End every block with an `InternalError` that stands for `error`."""
        problem = error if isinstance(error, InternalError) else InternalError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error if problem is not error else None
        for request, mediator in self.mediators.items():
            if not mediator.done:
                mediator.drop(problem)
                self.ended.add(request)
        self._waiting.clear()
        SEAT.leave()

    def check_integrity(self) -> None:
        """Assert that nothing is left behind when no request is running.

        Raises:
            InternalError: it names what is left.
        """
        left = {name: len(things) for name, things in self._empty_when_idle().items() if len(things)}
        if left:
            raise InternalError(f"left behind by an idle model: {left}.")

    def _empty_when_idle(self) -> dict[str, Sized]:
        """What is empty when no request is running."""
        return {"blocks": self.mediators, "waiting ports": self._waiting, "requests to end": self.ended}

    def _guarded(self, action: Callable[[], object]) -> object:
        """Run an action of the hub; its own errors end every block but never the engine."""
        try:
            return action()
        except Exception as error:
            self.give_up(error)
            return None
