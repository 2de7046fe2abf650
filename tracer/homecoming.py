"""What is done with what the invokes of a trace send home, in whatever order their blocks end."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from .failure import Failure, rebuild
from .results import unpack
from .streaming import Ended
from .trace import take_in, warn_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..envoy.envoy import RootEnvoy
    from .backend import Reply
    from .block import Block
    from .outer_tracer import OuterTracer


class Homecoming:
    """See `streaming.Delivery`. The tracer is known weakly: whatever waits for outputs must not keep it.

    Args:
        tracer: of the trace.
        model: the model that is traced.
        block: the body around the invokes.
        here: what that saved and the engine need not send home.
        lost: message and line of a warning for each value that it saved in vain.
    """

    def __init__(
        self,
        tracer: OuterTracer,
        model: RootEnvoy,
        block: Block,
        here: dict[str, object],
        lost: Sequence[tuple[str, int]],
    ) -> None:
        self._tracer = weakref.ref(tracer)
        self._invokes = tracer.invokes
        self._model = model
        self._block = block
        self._around = here
        self._lost = lost
        self._failures: dict[int, Failure] = {}
        self._warnings: dict[int, tuple[tuple[str, int], ...]] = {}

    def arrived(self, invoke: int, reply: Reply, result: object) -> dict[str, object]:
        """As in `Delivery`; the invoke has its saves and its result from now on."""
        take_in(self._model, reply)
        own = unpack(reply.saves)
        self._invokes[invoke].finish(own, result)
        self._warnings[invoke] = reply.warnings
        if reply.shared is not None:
            self._around.update(unpack(reply.shared))
        if reply.failure is not None:
            self._failures[invoke] = reply.failure
        return own

    def ended(self, name: Callable[[dict[str, object]], None] = lambda saves: None) -> Ended:
        """As in `Delivery`; `name` is given what is to be bound, if no invoke has failed."""
        own = [invoke.saves for invoke in self._invokes]
        saves = {name: value for one in (*own, self._around) for name, value in one.items()}
        tracer = self._tracer()
        if tracer is not None:
            tracer.finish(saves, [invoke.result for invoke in self._invokes])
        if not self._failures:
            bound = [invoke.saves for invoke in self._invokes if invoke.local]
            name({name: value for one in (*bound, self._around) for name, value in one.items()})
        warned = self._warn()
        return Ended(saves, self._around, self._error() or warned)

    def _error(self) -> BaseException | None:
        """The exception of the first invoke that failed, with a note that says which."""
        failed = sorted(self._failures)
        if not failed:
            return None
        error = rebuild(self._failures[failed[0]])
        others = f"; invokes {', '.join(map(str, failed[1:]))} failed too" if failed[1:] else ""
        error.add_note(f"in invoke {failed[0]} of 0 to {len(self._invokes) - 1}{others}")
        return error

    def _warn(self) -> Exception | None:
        """Show all warnings; gives the first that the caller's filters have made an error."""
        warned = []
        for invoke in self._invokes:
            assert invoke.site is not None
            warned.append(warn_of(self._warnings[invoke.index], invoke.site.block))
        if not self._failures:
            warned.append(warn_of([*self._lost, *self._doubled()], self._block))
        return next((error for error in warned if error is not None), None)

    def _doubled(self) -> Iterator[tuple[str, int]]:
        """Message and line of a warning for each name that several invokes saved."""
        for name, indices in self._collisions().items():
            message = (
                f"`{name}` was saved by invokes {', '.join(map(str, indices[:-1]))} and {indices[-1]}: the name holds "
                "what the last one saved. Make a list in front of the invokes (`values = list().save()`) and append "
                "to it in each, or name them (`with tracer.invoke(...) as first:`) and read `first.saves`."
            )
            yield message, self._block.lineno

    def _collisions(self) -> dict[str, list[int]]:
        """Names that several invokes saved by themselves, with the numbers of these.

        Left out are names of functions that the body calls, names that the body saved as well, values that one invoke
        took from the other to go on with, and names that are saved by none but invokes with a name after `as`, each of
        which has its own in `saves`.
        """
        found: dict[str, list[int]] = {}
        for invoke in self._invokes:
            for name in invoke.saves:
                if name in self._around or not invoke.local:
                    continue
                before = found.setdefault(name, [])
                if before and invoke.takes.get(name) == before[-1]:
                    before[-1] = invoke.index
                else:
                    before.append(invoke.index)
        nameless = {invoke.index for invoke in self._invokes if invoke.site is None or invoke.site.tracer is None}
        return {name: at for name, at in found.items() if len(at) > 1 and not nameless.isdisjoint(at)}
