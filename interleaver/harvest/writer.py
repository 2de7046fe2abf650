"""Rows on their way into shards: a few buffers, one that is filled while a thread writes the others.

A prompt gets a place in a buffer when it begins, and its rows are copied there as they come: a copy that is made in
memory which was used a moment ago is far cheaper than one that waits for the others in memory of its own. Whoever needs
a place waits when there is none, so memory is bounded and the model goes no faster than the disk.

There are three buffers, for the prompts of one engine step must all have places before the first of them is done: with
no more than one shard of prompts at once, that takes two of them, while the third is written. A shard
appears under its name when it is whole; what a killed process leaves behind is a file with another name, which the
next run of the harvest removes. A prompt is never in two shards.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

import torch

from ...envoy.errors import InternalError, MisuseError
from . import layout
from .plan import Plan

PATTERN = re.compile(r"shard-(\d{5,})\.safetensors")
_BUFFERS = 3
_PAUSE = 0.5
"""A block that waits is asked so often whether it has been ended."""
_NICENESS = 10
_LOCK = ".lock"
_LOCK_SECONDS = 20.0
"""How long to wait for the writer of a run that was killed: it notices that by itself."""


class Writer:
    """Writes the shards of one harvest.

    Args:
        plan: of the harvest.

    Raises:
        MisuseError: another harvest writes into the folder.

    Attributes:
        plan: of the harvest.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._folder = Path(plan.folder)
        self._lock = _locked(self._folder)
        for left in self._folder.glob(".*.part"):
            left.unlink()
        known = filter(None, map(PATTERN.fullmatch, os.listdir(self._folder)))
        self._number = 1 + max((int(name[1]) for name in known), default=-1)
        pinned = torch.cuda.is_available()
        with torch.inference_mode(False):
            buffers = [_Buffer(plan, pinned) for _ in range(_BUFFERS)]
        self._error: MisuseError | InternalError | None = None
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        self._full: SimpleQueue[_Buffer | None] = SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._buffer: _Buffer | None = None
        self._unfilled: list[_Buffer] = []
        self._thread = threading.Thread(target=self._run, name="invivo-harvest", daemon=True)
        self._thread.start()

    def place(self, rows: int) -> Place:
        """A place for the rows of one prompt; waits while there is none.

        Raises:
            MisuseError: an earlier shard could not be written.
        """
        if rows > self.plan.capacity:
            raise InternalError(f"{rows} rows of one prompt for shards of {self.plan.capacity}.")
        if self._buffer is not None and self._buffer.taken + rows > self.plan.capacity:
            self._pass_on()
        while self._buffer is None:
            with suppress(Empty):
                self._buffer = self._free.get(timeout=_PAUSE)
        if self._error is not None:
            raise self._error
        return Place(self, self._buffer, rows)

    def left(self, buffer: _Buffer) -> None:
        """A place in a buffer is filled, or given up."""
        if buffer in self._unfilled and not buffer.open:
            self._unfilled.remove(buffer)
            self._full.put(buffer)

    def close(self) -> None:
        """Write what is there and wait until it is on its way to the disk.

        Raises:
            MisuseError: a shard could not be written.
        """
        self._pass_on()
        for buffer in (*self._unfilled, None):
            self._full.put(buffer)
        self._thread.join()
        os.close(self._lock)
        if self._error is not None:
            raise self._error

    def _pass_on(self) -> None:
        """No more places in the buffer that is being filled: it goes to the thread with the last that is filled."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and buffer.open:
            self._unfilled.append(buffer)
        elif buffer is not None:
            self._full.put(buffer)

    def _run(self) -> None:
        with suppress(OSError):  # priorities are per thread in Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (buffer := self._full.get()) is not None:
            try:
                if self._error is None and buffer.prompts:
                    self._write(buffer)
            except OSError as error:
                self._error = MisuseError(
                    f"a shard of the harvest could not be written ({error}). The shards in {self._folder} stay good: "
                    "make room, and run the same harvest again to go on."
                )
            except Exception as error:
                self._error = InternalError(f"{type(error).__name__}: {error}")
            buffer.clear()
            self._free.put(buffer)

    def _write(self, buffer: _Buffer) -> None:
        name = f"shard-{self._number:05d}.safetensors"
        part = self._folder / f".{name}.part"
        try:
            layout.write(str(part), buffer.tensors(), {"format": "pt", "invivo_harvest": "1"})
            part.rename(self._folder / name)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._number += 1


class _Prompt(NamedTuple):
    """Where the rows of a prompt are in a shard, and the sha256 of its tokens."""

    number: int
    start: int
    end: int
    digest: bytes


class _Buffer:
    """Room for the rows of one shard.

    Attributes:
        columns: the room for each column of the plan.
        taken: rows that have been given places.
        open: places that are not filled yet.
        prompts: those that are.
        copied: comes when the last copy from a GPU is done.
    """

    def __init__(self, plan: Plan, pinned: bool) -> None:
        rows = plan.capacity
        self._plan = plan
        # Not touched before it is needed: a harvest of a few rows holds the memory of a few rows.
        self.columns = [
            torch.empty((rows, *column.shape), dtype=column.torch_dtype, pin_memory=pinned) for column in plan.columns
        ]
        self.prompt = torch.empty(rows, dtype=torch.int64)
        self.token_id = torch.empty(rows, dtype=torch.int32)
        self.position = torch.empty(rows, dtype=torch.int32)
        self.copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Forget all rows; the memory stays, since what is written for the first time is slow."""
        self.taken = self.open = 0
        self.prompts: list[_Prompt] = []

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """What the shard holds, by name, in pieces between which are places that were given up."""
        if self.copied is not None:
            self.copied.synchronize()
        self.prompts.sort(key=lambda prompt: prompt.start)
        ranges: list[list[int]] = []
        starts, rows = [], 0
        for prompt in self.prompts:
            if ranges and ranges[-1][1] == prompt.start:
                ranges[-1][1] = prompt.end
            else:
                ranges.append([prompt.start, prompt.end])
            starts.append(rows)
            rows += prompt.end - prompt.start
        by_row = {column.name: self.columns[at] for at, column in enumerate(self._plan.columns)}
        by_row |= {"prompt": self.prompt, "token_id": self.token_id, "position": self.position}
        found = {name: [tensor[start:end] for start, end in ranges] for name, tensor in by_row.items()}
        digests = bytearray(b"".join(prompt.digest for prompt in self.prompts))
        return found | {
            "prompts.number": [torch.tensor([prompt.number for prompt in self.prompts])],
            "prompts.start": [torch.tensor(starts)],
            "prompts.sha256": [torch.frombuffer(digests, dtype=torch.uint8).reshape(-1, 32)],
        }


class Place:
    """The rows of one prompt in a buffer; a context manager, at whose end the place is filled or given up."""

    def __init__(self, writer: Writer, buffer: _Buffer, rows: int) -> None:
        self._writer = writer
        self._buffer = buffer
        self._start = buffer.taken
        self._end = buffer.taken + rows
        buffer.taken += rows
        buffer.open += 1

    def put(self, number: int, rows: torch.Tensor) -> None:
        """Copy the rows of a column, by its number in the plan.

        Raises:
            MisuseError: they do not fit.
        """
        buffer, column, due = self._buffer, self._writer.plan.columns[number], self._end - self._start
        if tuple(rows.shape) != (due, *column.shape):  # a copy would stretch a single row
            raise MisuseError(
                f"`{column.name}` gave rows of the shape {list(rows.shape)}, and {due} of the shape "
                f"{list(column.shape)} were due: only ports with one row per token can be harvested."
            )
        buffer.columns[number][self._start : self._end].copy_(rows, non_blocking=buffer.copied is not None)

    def fill(self, prompt: int, prompt_ids: bytes, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """All columns have their rows; say whose they are.

        Args:
            prompt: number of the prompt.
            prompt_ids: all of its tokens, as 32-bit numbers.
            token_ids: the token of each row.
            positions: its place in the prompt.
        """
        buffer, here = self._buffer, slice(self._start, self._end)
        buffer.prompt[here] = prompt
        buffer.token_id[here] = token_ids
        buffer.position[here] = positions
        if buffer.copied is not None:  # behind the last copy, in the stream of the model
            buffer.copied.record()
        if self._end > self._start:
            buffer.prompts.append(_Prompt(prompt, self._start, self._end, hashlib.sha256(prompt_ids).digest()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._buffer.open -= 1
        self._writer.left(self._buffer)


def _locked(folder: Path) -> int:
    """An open file that nobody else has while it is open."""
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    latest = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > latest:
                os.close(file)
                raise MisuseError(
                    f"another harvest is writing into {folder}: wait for it, or choose another folder."
                ) from None
            time.sleep(0.1)
