"""How far a harvest has come, in a terminal or a notebook's output."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A bar over prompts, with tokens and megabytes per second; a context manager.

    Args:
        shown: False shows nothing.
        prompts: how many there are.
        done: how many of them were there before.
    """

    def __init__(self, shown: bool, prompts: int, done: int) -> None:
        columns = (
            TextColumn("harvest"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._progress.add_task("", total=prompts, completed=done, speed="")
        self._began = monotonic()
        self._tokens = self._bytes = 0

    def step(self, tokens: int, size: int) -> None:
        """One more prompt is done, with so many tokens and bytes."""
        self._tokens += tokens
        self._bytes += size
        seconds = max(monotonic() - self._began, 1e-3)
        speed = f"{self._tokens / seconds:,.0f} tokens/s, {self._bytes / seconds / 1e6:,.0f} MB/s"
        self._progress.update(self._task, advance=1, speed=speed)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
