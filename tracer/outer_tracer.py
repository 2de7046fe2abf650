"""The object after `as` of a trace of several prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from ..envoy import active
from ..envoy.errors import MisuseError
from .barrier import Barrier
from .invoke import Invoke
from .tracer import Tracer

MakeRequest: TypeAlias = "Callable[[tuple[object, ...], dict[str, Any]], tuple[object, int]]"
"""Makes the backend's request of a prompt and sampling arguments; with the seed of the block."""


class OuterTracer(Tracer):
    """Around the invokes: `invoke` and `barrier`. In an invoke's block: that block's tracer. Afterwards: `saves`,
    `results` and `invokes`.

    Args:
        trace: id of the trace.
        make_request: see `MakeRequest`.
        sampling: sampling arguments of all invokes.
        take_in: called with each invoke when its body is captured.

    Attributes:
        invokes: the invokes in the order in which they were captured.
    """

    def __init__(
        self, trace: str, make_request: MakeRequest, sampling: dict[str, Any], take_in: Callable[[Invoke], None]
    ) -> None:
        super().__init__()
        self.invokes: list[Invoke] = []
        self._trace = trace
        self._make_request = make_request
        self._sampling = sampling
        self._take_in: Callable[[Invoke], None] | None = take_in
        self._made: list[Invoke] = []
        self._barriers = 0
        self._open = False
        self._results: list[object] = []

    def invoke(self, *prompt: object, **sampling: Any) -> Invoke:
        """One prompt: ``with tracer.invoke(prompt, max_tokens=2) as first:``. Its body is captured, not run here.

        Args:
            prompt: what `model.trace` takes.
            sampling: sampling arguments that go before those of the trace.

        Raises:
            MisuseError: not in the body of the trace.
            PromptError, SamplingError: as in `model.trace`.
        """
        self._check("`tracer.invoke`")
        request, seed = self._make_request(prompt, {**self._sampling, **sampling})
        invoke = Invoke(request, seed, self._captured)
        self._made.append(invoke)
        return invoke

    def barrier(self, count: int) -> Barrier:
        """A place where `count` blocks wait for each other: ``meet = tracer.barrier(2)``, and in blocks ``meet()``.

        Raises:
            MisuseError: not in the body of the trace, or not a number of blocks.
        """
        self._check("`tracer.barrier`")
        if isinstance(count, bool) or count < 1:
            raise MisuseError(f"`tracer.barrier` takes the number of blocks that meet, at least 1; got {count!r}.")
        self._barriers += 1
        return Barrier(str(self._barriers - 1), count)

    @property
    def results(self) -> list[Any]:
        """The finished outputs of the requests in invoke order, once the `with` has ended."""
        return list(super().result)

    @property
    def result(self) -> Any:
        """In a block, that of its request, as in `Tracer`; after the `with`, `results`."""
        return super().result if active.current() is not None else self.results

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the context lasts, the body runs.

        Raises:
            MisuseError: it made an invoke that it did not enter.
        """
        self._open = True
        try:
            yield
        finally:
            self._open = False
            made, self._made, self._take_in = self._made, [], None
            for invoke in made:
                invoke.close()
        if any(invoke.site is None for invoke in made):
            raise MisuseError(
                "`tracer.invoke(...)` was called without a `with`, so there is no body and nothing is sent for it. "
                "Write `with tracer.invoke(prompt):`; its body may be `pass`."
            )

    def _captured(self, invoke: Invoke) -> None:
        self._check("`tracer.invoke`")
        if invoke.index >= 0:
            raise MisuseError("an invoke is entered once: call `tracer.invoke(...)` in each `with`.")
        invoke.trace, invoke.index = self._trace, len(self.invokes)
        assert self._take_in is not None, "the body runs"
        self._take_in(invoke)
        self.invokes.append(invoke)

    def _check(self, what: str) -> None:
        if self._open:
            return
        if active.current() is not None:
            self._single(what)
        raise MisuseError(f"{what} was called when the body of its trace had ended. Call it inside of the `with`.")
