"""How far the model has come in its step, and which ports may still come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ..envoy.address import LOGITS, SAMPLES, Port
from ..envoy.errors import PortError, PortNotReachedError, PortPassedError

if TYPE_CHECKING:
    from .mediator import Mediator
    from .supply import Supply


class Place:
    """Where the model is, for all blocks that meet it.

    Attributes:
        requests: those of the step.
        order: the places of each port in execution order; empty until they are learned.
        learned: the order is known, so that a port which is not in it is never called.
        number: the place of the port that fired last; before the first one, -1.
        port: that port.
        inside: the forward is running.
        sampling: it is over, and logits and samples come.
        over: the step is over.
        firing: blocks have their turns at the port.
        doubts: why ports have passed for requests that wait for them, unless they come again.
        supply: what has passed at ports whose blocks have their turns now; None if the forward stands at the port.
    """

    __slots__ = (
        "doubts",
        "firing",
        "inside",
        "learned",
        "number",
        "order",
        "over",
        "port",
        "requests",
        "sampling",
        "supply",
    )

    def __init__(self) -> None:
        self.requests: Collection[str] = ()
        self.order: Mapping[Port, Sequence[int]] = {}
        self.learned = False
        self.number = -1
        self.port: Port | None = None
        self.inside = False
        self.sampling = False
        self.over = True
        self.firing = False
        self.doubts: dict[tuple[Port, str], str] = {}
        self.supply: Supply | None = None

    def begin(self, requests: Collection[str]) -> None:
        """A step of these requests begins."""
        self.requests, self.number, self.port = requests, -1, None
        self.inside, self.sampling, self.over = True, False, False
        self.doubts.clear()
        self.supply = None

    def at(self, port: Port) -> None:
        """A port fires."""
        self.port = port
        if not self.sampling:
            for number in self.order.get(port, ()):
                if number > self.number:
                    self.number = number
                    break

    def move(self, port: Port | None, number: int | None) -> None:
        """A block is at another port than the others, or is not any more; `number` is None if that is of the step."""
        self.port = port
        if number is not None:
            self.number = number

    def forward_done(self) -> None:
        """The forward is over."""
        self.inside, self.sampling = False, True

    def learn(self, order: Mapping[Port, Sequence[int]]) -> None:
        """The order is known from now on."""
        self.learned, self.order = True, order

    def end(self) -> None:
        """The step is over."""
        self.inside, self.over = False, True
        self.supply = None

    def passed(self, port: Port, request: str, step: int) -> str | None:
        """Why a port cannot come any more for a request that is in this step of its own; None if it may."""
        if request not in self.requests:
            return (
                f"{port} has passed: step {step} of this request was over when the barrier let the block go on. Read "
                "the port before the barrier, or in the next step, in a loop over `tracer.iter`."
            )
        if self.firing and port is self.port:
            return None  # another block is at it now
        if self.over:
            return f"{port} has passed: the step is over. Ask for it in the next step, in a loop over `tracer.iter`."
        late = self.port is not None and self.port.of_step
        if port.of_step:
            passed = self.port is not None and self.port.kind == SAMPLES and port.kind == LOGITS
            return None if not passed else f"{port} has passed: the model is at {self.port}, which comes after it."
        places = self.order.get(port)
        if not places:
            if self.learned or not late:
                return None
            its_place = f"{port}, like those of all modules, comes before"
        elif places[-1] > self.number and not late:
            return None
        else:
            its_place = f"{port} is at place {places[-1]}"
        why = (
            f"{port} has passed: the model is at {self.port} "
            f"({'after all modules' if late else f'place {self.number} in execution order'}), and {its_place}. "
            "Read ports in execution order, and keep what you read in a variable."
        )
        if self.learned or late or not self.inside:
            return why
        self.doubts[port, request] = why  # a module may be called again, as long as the order is not known
        return None

    def missed(self, port: Port, mediator: Mediator, known: bool, fires: Port) -> PortError:
        """The error of a block that waited for a port in vain.

        Args:
            port: the port.
            mediator: of the block.
            known: the port comes in other steps.
            fires: the port under which its module fires.
        """
        why = self.doubts.get((port, mediator.request))
        if why is not None:
            return PortPassedError(why)
        if port.of_step:
            return PortNotReachedError(
                f"{port} did not come in step {mediator.step}: no token was generated in it. Logits and samples are "
                "there where a model goes on from a prompt, not where a module is only called."
            )
        other = fires is not port
        text = f"{port} did not come in step {mediator.step}: the module was not called"
        text += " by this name." if other else "."
        if not known:
            text += " The engine does not call this module as a module (or not in this mode)"
            text += f", or as {fires.address}, since it hangs there too: then it fires as {fires}." if other else "."
        text += " Look at the model's tree for modules with output shapes; those were called."
        return PortNotReachedError(text)
