"""``with tracer.invoke(prompt):``: one prompt of a trace of several, captured on entry and run with the others."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType, TracebackType
from typing import NoReturn, Self

from ..envoy.errors import MisuseError, OutsideBlockError
from .block import Payload
from .capture import Captured, Site, locate, read
from .frames import Skipper, bind, release
from .handed import HandedOn
from .tracer import Tracer


class Invoke(Tracer):
    """One invoke, as a context manager used once, and the object after its `as`.

    In the block it is the block's tracer; `saves` and `result` are there once the outer `with` has ended.

    Args:
        request: what the backend makes of the prompt and sampling arguments.
        seed: seed of the random numbers drawn in the block.
        captured: called with the invoke once its body is captured; what it raises leaves the `with`.

    Attributes:
        site: the block; None before the `with`.
        frame: the frame that holds the `with`, while the body is captured.
        values: the variables that the block reads, while the body is captured.
        payload: what travels, as far as it is known when the body is captured.
        barriers: the barriers that it refers to.
        takes: names whose values come from earlier invokes, with the number of that.
        trace: id of the trace that it belongs to.
        index: its number among the invokes of that.
        local: whether its `with` stands in the body of the trace itself, not in a function that is called there.
    """

    described = "the tracer of another invoke"

    def __init__(self, request: object, seed: int, captured: Callable[[Invoke], None]) -> None:
        super().__init__()
        self.request = request
        self.seed = seed
        self.site: Site | None = None
        self.frame: FrameType | None = None
        self.values = Captured({}, {})
        self.payload: Payload | None = None
        self.barriers: tuple[tuple[str, int], ...] = ()
        self.takes: dict[str, int] = {}
        self.trace = ""
        self.index = -1
        self.local = False
        self._captured: Callable[[Invoke], None] | None = captured
        self._skipper: Skipper | None = None
        self._left = False

    @property
    def spent(self) -> bool:
        """Whether its `with` is over."""
        return self._left

    def __enter__(self) -> Self:
        """Capture the body.

        Raises:
            CaptureError, UnknownNameError, TransferError: as in a trace of one prompt.
            MisuseError: the body of the trace has ended, or this is not the first `with` of the invoke.
        """
        if self._captured is None:
            raise MisuseError(
                "an invoke was entered when the body of its trace had ended. Enter it inside of the `with`."
            )
        self.frame = sys._getframe(1)
        self.site = locate(self.frame, "invoke")
        self.values = read(self.site, self.frame)
        self._captured(self)
        self.values = Captured({}, {})
        frame, self.frame = self.frame, None
        self._skipper = Skipper(frame, self.site, self)
        self._skipper.arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Leave stand-ins under the names that the block assigns."""
        assert self._skipper is not None and self.site is not None
        frame = self._skipper.skipped(error)
        self._left = True
        if frame is None:
            return False
        bind(frame, {name: HandedOn(self.trace, self.index, name) for name in _assigned(self.site, frame)}, ())
        return True

    def close(self) -> None:
        """The body of the trace has ended. Whoever holds the invoke does not keep the tracer from now on."""
        self._captured = None

    def sent(self) -> object:
        """Take out the request, and let go of the payload: both are sent."""
        request, self.request, self.payload = self.request, None, None
        return request

    @property
    def backend(self) -> NoReturn:
        """Raises `OutsideBlockError`: the outputs of all invokes come together."""
        raise OutsideBlockError(
            'the outputs of all invokes come together, in models with `mode="async"`: `async for output in '
            "tracer.backend` with the tracer of the trace, where `output.invoke` is the number of the invoke."
        )

    @property
    def _end(self) -> str:
        return 'the outer `with` has ended, or with `mode="async"` once the last output of the invoke has been taken'

    def taken_from(self, other: Invoke) -> list[str]:
        """Names whose values it takes from another one."""
        return [name for name, index in self.takes.items() if index == other.index]


def _assigned(site: Site, frame: FrameType) -> list[str]:
    """Names of the caller's scope that the block assigns, but for modules that it imports and the scope has anyway."""
    imported = _imports(site.tree)
    scope = frame.f_locals
    have = {name for name in imported if name in scope or name in frame.f_globals}
    release(frame, scope)
    return [name for name in site.stores if name not in site.global_names and name not in have and name != site.tracer]


@lru_cache(maxsize=256)
def _imports(tree: ast.With) -> frozenset[str]:
    """Names that `import` statements of the body bind."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return frozenset(alias.asname or alias.name.partition(".")[0] for node in statements for alias in node.names)
