"""The smallest trace there can be: captures its body, skips it, and runs it right here when the `with` ends.

It uses the real capture, frames and program, so that what they do can be tested without a model or a codec.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from invivo.tracer import capture, frames, program
from invivo.tracer.block import TracerHandle


class ToyTrace(TracerHandle):
    """``with ToyTrace() as t:``; afterwards `captured`, `site` and `scope` (the block's variables) can be looked at."""

    site: capture.Site
    captured: capture.Captured
    scope: dict[str, object]

    def __init__(self, *_prompt: object) -> None:
        """Takes what a real trace takes."""

    def trace(self, *_prompt: object) -> ToyTrace:
        return ToyTrace()

    @property
    def iter(self) -> list[range]:
        return [range(3)]

    def all(self) -> range:
        return range(3)

    def __enter__(self) -> Self:
        frame = sys._getframe(1)
        self.site = capture.locate(frame)
        self.captured = capture.read(self.site, frame)
        self._skipper = frames.Skipper(frame, self.site, self)
        self._skipper.arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        frame = self._skipper.skipped(error)
        if frame is None:
            return False
        saved: dict[int, object] = {}

        def save(value: Any, *, stream: bool = False, names: tuple[str, ...] = ()) -> Any:
            saved[id(value)] = value
            return value

        extras: dict[str, object] = {program.SAVE: save}
        if self.site.tracer is not None:
            extras[self.site.tracer] = self
        self.program = program.compile_block(self.site.block)
        self.scope = self.program.run(self.captured.locals, self.captured.globals, extras)
        home = {name: value for name, value in self.scope.items() if id(value) in saved}
        frames.bind(frame, home, self.site.global_names)
        return True


class Recorder:
    """A context manager that writes down when it is entered and left."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def __enter__(self) -> Self:
        self._log.append(f"+{self._name}")
        return self

    def __exit__(self, *_: object) -> None:
        self._log.append(f"-{self._name}")
