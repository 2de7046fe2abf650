"""What is known of one block while it runs."""

from __future__ import annotations

from collections.abc import Callable

from ..envoy import active
from ..envoy.address import Port
from ..envoy.tree import ModuleTree
from ..tracer.naming import Saved
from ..tracer.tracer import Tracer
from .bounds import Bounds
from .group import Member
from .place import Place
from .streamed import Streamed
from .values import Held
from .waits import Wait
from .windows import Share


class Running(active.Session):
    """A block, as the hub and its own side see it; what it does is in `Mediator`.

    There are slots for all of it: with more than thirty attributes, an object without them is looked up in slowly.

    Attributes:
        tracer: the object that the block knows as its tracer.
        request: id of the request that it runs for.
        share: that request's rows in the engine step that is running.
        edited: it has changed what a module takes or gives, and so the keys and values of later layers.
        wait: what it waits for; None before its first turn and after its last.
        asks: at a port, the place of the only tensor of a tuple that it wants as yet; None if it wants all.
        step: the generation step it is in.
        port: the port it is at, as long as that one can be read and written.
        held: what it holds of that port.
        place: how far the model has come.
        apart: a barrier has let it go on, maybe when its own step was over.
        failure: the exception that ended it.
        failed_at: the port that it was at then.
        stopped: it called `stop`.
        stopped_at: the line of that; 0 before.
        scope: variables of the block at its end.
        saved: what it saved, in order.
        warnings: message and line of each warning.
        partial_prompt: step 0 may be the end of the prompt only, where the rest of it was computed for another request.
        fixed_samples: why the request's samples cannot be written; None if they can.
        member: its place among the blocks of its trace; None if it is alone.
        index: the number of that place; blocks at the same port have their turns in this order.
        alone: it shares nothing with other blocks.
        habits: the step in which it was last served from a `Supply`, and which of its ports it asked for, by number.
        ran_on: the place in the supply of the port that it has come to without handing over, and what it holds there.
        streamed: what it streamed in this step; None if nobody listens, and ``stream=True`` is an ordinary save.
        left: its request has left the engine, so no further step comes.
        bounds: of whole numbers that it may put at ports; None where they can hurt nobody else.
    """

    __slots__ = (
        "alone",
        "apart",
        "asks",
        "bounds",
        "caller",
        "edited",
        "failed_at",
        "failure",
        "fixed_samples",
        "habits",
        "held",
        "index",
        "left",
        "line",
        "member",
        "partial_prompt",
        "place",
        "port",
        "ran_on",
        "request",
        "saved",
        "scope",
        "share",
        "step",
        "stopped",
        "stopped_at",
        "streamed",
        "tracer",
        "tree",
        "wait",
        "warnings",
    )

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.tracer = Tracer()
        self.request = ""
        self.share = Share(None, None, None)
        self.edited = False
        self.wait: Wait | None = None
        self.asks: int | None = None
        self.step = 0
        self.port: Port | None = None
        self.failure: BaseException | None = None
        self.failed_at: Port | None = None
        self.stopped = False
        self.stopped_at = 0
        self.scope: dict[str, object] = {}
        self.saved: list[Saved] = []
        self.warnings: list[tuple[str, int]] = []
        self.partial_prompt = self.left = self.apart = False
        self.fixed_samples: str | None = None
        self.member: Member | None = None
        self.index = 0
        self.alone = True
        self.habits: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.ran_on: tuple[int, Held] | None = None
        self.streamed: Streamed | None = None
        self.line: Callable[[], int] = lambda: 0
        self.place = Place()
        self.bounds: Bounds | None = None
        self.caller: Callable[[str, tuple[object, ...], dict[str, object]], object] | None = None
        self.held: Held | None = None
