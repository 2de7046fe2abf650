"""One block running for one request.

A mediator is a greenlet on the thread that runs the model. It runs until it asks for a port, a step or the end of the
request, hands over saying which (`Wait`), and goes on when the hub gives it what it waits for. Everything here runs
on that thread; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FrameType

import greenlet

from ..envoy import active
from ..envoy.address import Port
from ..envoy.errors import (
    InternalError,
    InvokeError,
    LimitError,
    MemoryLimitError,
    PortError,
    PortPassedError,
    SaveLimitError,
    StepError,
)
from ..envoy.tree import ModuleTree
from ..tracer.naming import Saved, saved_by_name
from .guard import Guard, OverLimit, save_error
from .limits import Limits
from .memory import give_back
from .meter import fitting, size_of
from .modes import State, Turns, state
from .padding import padded
from .running import Running
from .supply import Supply
from .values import Held
from .views import Part, view, with_part
from .waits import WAITS, BarrierWait, CallWait, EndWait, StepWait, StopBlock, Wait


class Mediator(Running):
    """A block and its place in the run of the model."""

    __slots__ = ("_body", "_ended", "_greenlet", "_guard", "_result", "_turns")

    def __init__(
        self,
        tree: ModuleTree,
        turns: Turns,
        body: Callable[[Mediator], dict[str, object]],
        limits: Limits | None = None,
    ) -> None:
        super().__init__(tree)
        self._turns = turns
        self._body = body
        self._guard = Guard(limits) if limits is not None and limits.any else None
        self._ended = False
        self._result: object = None
        self._greenlet: greenlet.greenlet | None = greenlet.greenlet(partial(padded, self._run))

    # --- the engine's side

    @property
    def done(self) -> bool:
        """The block has ended, in whatever way."""
        return self._greenlet is None

    def go_on(self) -> None:
        """Its first turn, or the next one from a barrier on that all have come to."""
        self._turn(None)

    def at_port(self, port: Port, held: Held, now: State | None = None) -> None:
        """Its turn at the port that it waited for; `held` has its copy, and afterwards its edits.

        Whoever gives several blocks their turns looks at torch's state once (`now`).
        """
        self.port, self.held = port, held
        self._turn(None, None, now)

    def at_step(self, step: int) -> None:
        """Its turn at the beginning of the step that it waited for."""
        self.step = step
        self._turn(True)

    def answer(self, wait: CallWait, result: object, error: Exception | None = None) -> None:
        """Its turn when the module that it waited for was called; it is still at its port."""
        self.port, self.held = wait.port, wait.held
        self._turn(result, error)

    @property
    def waits_for_end(self) -> bool:
        """Whether it goes on when its request has ended, and not before."""
        return isinstance(self.wait, EndWait) or (self.left and isinstance(self.wait, StepWait))

    def end(self, result: object) -> None:
        """The request has ended: let the block run to its end."""
        self._ended, self._result = True, result
        if self.done:
            return
        if self.wait is None:
            self.drop(StepError("the request ended before the block could begin."))
        elif isinstance(self.wait, Port):
            self.fail(InternalError(f"{self.wait} was still waited for when the request had ended."))
        elif isinstance(self.wait, BarrierWait):
            assert self.member is not None, "there are barriers in a group only"
            self.fail(self.member.unmet(self.wait.barrier, "its request had ended"))
        else:
            self._turn(result if isinstance(self.wait, EndWait) else False)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the block, at the line where it waits."""
        self._turn(None, error)

    def over(self, error: LimitError) -> None:
        """It is over a limit: whatever it has its next turn for, it ends with `error`, and lets go of what it held."""
        if self._guard is not None:
            self._guard.error = self._guard.error or error

    @property
    def frame(self) -> FrameType | None:
        """The innermost of its frames, while it waits."""
        return self._greenlet.gr_frame if self._greenlet is not None else None

    def drop(self, error: BaseException) -> None:
        """End the block from outside, without another turn of the user's code."""
        self.failure = self.failure or error
        if self._greenlet is not None and self._greenlet:
            self._turns.begin()
            try:
                if self._guard is None:
                    self._greenlet.throw(greenlet.GreenletExit)
                else:
                    self._guard.end(self._greenlet, self.failure)
            finally:
                self._turns.end(over=True)
        if self._guard is not None:
            self._guard.leave()
        self._greenlet = None
        self.wait = None
        self._give()

    def within_limit(self, values: dict[str, object]) -> tuple[dict[str, object], SaveLimitError | None]:
        """Those of some values that may come home; and why not all may."""
        limit = self._guard.limits.saves if self._guard is not None else None
        if limit is None or not values or (size := size_of(values.values())) <= limit:
            return values, None
        return fitting(values, limit), save_error(size, limit)

    def forget(self) -> None:
        """Let go of everything that the block held, once it was sent home."""
        if self.failure is not None:
            self.failure.__traceback__ = None
        self.failure, self.scope, self.saved = None, {}, []

    def _turn(self, value: object, error: Exception | None = None, now: State | None = None) -> None:
        block, turns = self._greenlet, self._turns
        assert block is not None, "a block that has ended has no turns"
        self.wait = None
        light = turns.light(now if now is not None else state())
        if not light:
            turns.begin()
        try:
            if self._guard is not None:
                given = self._guard.turn(block, value, error)
            else:
                given = block.switch(value) if error is None else block.throw(error)
            if type(given) is Port or type(given) in WAITS:
                self.wait = given  # type: ignore[assignment]  # one of them
        finally:
            if not light:
                turns.end(over=self.wait is None)
            self.port = self.held = None
        if self.wait is None:
            self._greenlet = None
            if self._guard is not None:
                self._leave(self._guard)
            self._give()

    def _give(self) -> None:
        """The block is over: what other blocks of the trace take from it is there, or never will be."""
        if self.member is not None:
            self.member.give(self.scope, self.failure)

    def _leave(self, guard: Guard) -> None:
        """The block has ended; if that was over a limit, let go of all that it held and did not save."""
        guard.leave()
        error = guard.lighter(self.failure)
        if error is not None:
            self.failure = error
            self.scope = fitting(saved_by_name(self.scope, self.saved), guard.limits.saves)
            kept = {id(value) for value in self.scope.values()}
            self.saved = [entry for entry in self.saved if id(entry.value) in kept]
            if isinstance(error, MemoryLimitError):
                give_back()

    def _run(self, _first: object) -> None:
        active.enter(self)
        try:
            self.scope = self._body(self)
            if not self.stopped:
                self._leave_last()
        except StopBlock:
            pass
        except greenlet.GreenletExit:
            raise
        except OverLimit as over:
            if over.guard is not self._guard:
                raise  # of the block that this one runs in
            self.failure, self.failed_at = over, self.port
        except BaseException as error:
            self.failure, self.failed_at = error, self.port

    # --- the block's side

    def read(self, port: Port, part: Part) -> object:
        if port is not self.port:
            self._go(port)
        value = self.held.value  # type: ignore[union-attr]  # at a port there is one
        return value if part == "output" else view(value, part)

    def read_item(self, port: Port, index: int) -> object:
        if port is not self.port:
            self._go(port, index)
        return self.held.item(index)  # type: ignore[union-attr]

    def write(self, port: Port, part: Part, value: object) -> None:
        if port is not self.port:
            self._go(port)
        assert self.held is not None
        self.held.assign(with_part(self.held.value, part, value), str(port))

    def call(self, address: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self._over()
        assert self.caller is not None, "the hub sets it"
        self._turns.sit()  # the module may draw
        return self.caller(address, args, kwargs)

    def advance(self, step: int) -> bool:
        if self._over():
            return False
        if step == self.step:
            return True
        if step < self.step:
            raise StepError(f"step {step} has passed: the request is in step {self.step}, and steps do not come again.")
        return bool(self.hand_over(StepWait(step)))

    def result(self) -> object:
        return self._result if self._over() else self.hand_over(EndWait())

    def stop(self) -> None:
        if self._over():
            raise StepError("`tracer.stop()` came after the request had ended.")
        self._leave_last()
        self.stopped_at, self.port, self.held = self.line(), None, None
        self.stopped = self._ended = True
        raise StopBlock

    def _over(self) -> bool:
        """Whether the request has ended; stops once more a block that has caught the end and goes on."""
        if self.stopped:
            raise StopBlock
        return self._ended

    def meet(self, barrier: str, count: int) -> None:
        if self._over():
            raise InvokeError("the block came to a barrier when its request had ended: no other block can meet it.")
        if count > 1:
            self.hand_over(BarrierWait(barrier, count))

    def save(self, value: object, *, stream: bool, names: tuple[str, ...]) -> object:
        line, sent = self.line(), False
        if stream and self.streamed is not None and not self._ended:
            self.streamed.add(value, names, self.port)
            sent = True
            # Of a statement in a loop the last value may be the one at the end; those before need not be held.
            self.saved = [old for old in self.saved if not (old.sent and (old.line, old.names) == (line, names))]
        self.saved.append(Saved(value, names, line, sent))
        return value

    def warn(self, message: str) -> None:
        self.warnings.append((message, self.line()))

    def _go(self, port: Port, asks: int | None = None) -> None:
        """Be at `port`, which is not the current one, by waiting for it."""
        if self._ended and self._over():
            raise StepError(
                f"{port} was asked for after the request had ended (in step {self.step}). Read ports before the end, "
                "inside the loop over `tracer.iter`."
            )
        place, self.asks = self.place, asks
        known = place.order.get(port)
        if known is None or known[-1] <= place.number or not place.inside or self.apart:  # not the usual case
            passed = place.passed(port, self.request, self.step)
            if passed is not None:
                raise PortPassedError(passed)
        if place.supply is None or not self.alone or not self._run_on(place.supply, port):
            self.hand_over(port)

    def _run_on(self, supply: Supply, port: Port) -> bool:
        """Take what has passed at `port`, if it is there, and be there without handing over.

        Not when the port before was edited, which concerns the model, nor in a turn that has lasted long: each has its
        own limit of time.
        """
        guard, held = self._guard, self.held
        if greenlet.getcurrent() is not self._greenlet or (guard is not None and guard.long):
            return False
        if self._turns.checked:
            self._turns.check()
        if held is not None:
            held.settle(self.bounds)
            if held.changed is not None:
                return False
        if guard is not None and (self.saved or guard.error is not None):
            guard.check(self.saved)
        held = supply.take(self, port)
        if held is None:
            return False
        self.port, self.held = port, held
        return True

    def _leave_last(self) -> None:
        """See what it has changed at its last port."""
        if self.held is not None:
            self.held.settle(self.bounds)

    def hand_over(self, wait: Wait) -> object:
        """Wait; gives what its next turn is given."""
        if self._turns.checked:
            self._turns.check()
        if self.held is not None:
            self.held.settle(self.bounds)
        if self._guard is not None and (self.saved or self._guard.error is not None):
            self._guard.check(self.saved)
        current = greenlet.getcurrent()
        if current is not self._greenlet:
            raise PortError(f"a port was asked for outside the block's own flow of control (in {current!r}).")
        back = current.parent
        assert back is not None
        return back.switch(wait)
