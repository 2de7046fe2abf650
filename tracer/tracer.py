"""The object after `as`: control of the running request inside the block, its results afterwards."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from ..envoy import active
from ..envoy.address import suggestion
from ..envoy.errors import MisuseError, OutsideBlockError, UnknownNameError
from .block import TracerHandle
from .iteration import Steps

if TYPE_CHECKING:
    from .streaming import Outputs

_UNSET = object()
_NOT_THEIRS = frozenset({"described", "follow", "finish", "spent", "open", "close", "sent", "taken_from"})
"""Public names of tracers that are there for invivo itself."""


class Tracer(TracerHandle):
    """One trace.

    Inside the block: `iter`, `all`, `stop` and `result`. After the `with`: `saves` and `result`; in an asynchronous
    engine first `backend`, or ``await tracer``, and these when the last output has come.
    """

    def __init__(self) -> None:
        self._saves: dict[str, object] | None = None
        self._result: object = _UNSET
        self._outputs: Outputs | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for names that are not there, and where a property has raised an `AttributeError`."""
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises
            known = [own for own in dir(type(self)) if not own.startswith("_") and own not in _NOT_THEIRS]
            hint = suggestion(name, known)
            if name in ("next", "step", "steps"):
                hint = " For the next step, loop: `for step in tracer.iter[:]:`."
            raise UnknownNameError(f"the tracer has no `{name}`.{hint}")

    @property
    def iter(self) -> Steps:
        """Steps to loop over: ``for step in tracer.iter[1:]``."""
        return Steps()

    def all(self) -> Iterator[int]:
        """Every step of the request, as ``tracer.iter[:]``."""
        return iter(Steps())

    def stop(self) -> None:
        """End the request with the token of this step, keep the saves, and leave the block."""
        active.session("`tracer.stop()`").stop()

    @property
    def result(self) -> Any:
        """The finished output of the request (vLLM's `RequestOutput`; the local backend's `LocalOutput`).

        Inside the block, waits until the request has ended.
        """
        session = active.current()
        if session is not None:
            return session.result()
        if self._result is _UNSET:
            raise OutsideBlockError(f"`tracer.result` is there once {self._end}.")
        return self._result

    def invoke(self, *prompt: object, **sampling: object) -> Any:
        """One prompt of a trace of several; see `tracer.outer.OuterTracer`.

        Raises:
            MisuseError: this trace is not one of several prompts.
        """
        self._single("`tracer.invoke`")

    def barrier(self, count: int) -> Any:
        """A place where blocks wait for each other; see `tracer.outer.OuterTracer`.

        Raises:
            MisuseError: this trace is not one of several prompts.
        """
        self._single("`tracer.barrier`")

    def _single(self, what: str) -> NoReturn:
        if active.current() is not None:
            raise MisuseError(
                f"{what} was called in a block. It belongs into the body of a trace without a prompt, around the "
                "invokes, which runs in your program."
            )
        raise MisuseError(
            f"{what} is for a trace without a prompt. Leave the prompt out of `model.trace(...)`, and give it to an "
            "invoke: `with model.trace(**sampling) as tracer:`, and in it `with tracer.invoke(prompt):`."
        )

    @property
    def saves(self) -> dict[str, Any]:
        """Saved values by the name that held them at the end of the block."""
        if self._saves is None:
            raise OutsideBlockError(f"`tracer.saves` is there once {self._end}.")
        return self._saves

    @property
    def backend(self) -> Outputs:
        """The outputs of a request that was started and not waited for: ``async for output in tracer.backend``."""
        if self._outputs is None:
            raise OutsideBlockError(
                '`tracer.backend` is there once the `with` has ended, for models with `mode="async"`. With others the '
                "`with` waits for the request, and `tracer.saves` and `tracer.result` are there after it."
            )
        return self._outputs

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait for the end of a request that was not waited for; gives `saves`."""
        return self.backend.collect().__await__()

    @property
    def _end(self) -> str:
        if self._outputs is None:
            return "the `with` has ended"
        return "the last output has been taken: `async for output in tracer.backend`, or `await tracer`"

    def follow(self, outputs: Outputs) -> None:
        """Be the tracer of a request that has been started; called by the trace at the end of its `with`."""
        self._outputs = outputs

    @property
    def spent(self) -> bool:
        """Whether the trace has ended."""
        return self._saves is not None or self._outputs is not None

    def finish(self, saves: dict[str, object], result: object) -> None:
        """Take in what came home; called by the trace when the request has ended."""
        self._saves = saves
        self._result = result
