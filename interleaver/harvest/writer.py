"""Rows on their way into shards: two buffers, one that is filled while a thread writes the other.

Whoever adds rows waits when both are full, so memory is bounded and the model goes no faster than the disk. A shard
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from ...envoy.errors import InternalError, MisuseError
from . import layout
from .plan import Plan

PATTERN = re.compile(r"shard-(\d{5,})\.safetensors")
_BUFFERS = 2
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
        self._thread = threading.Thread(target=self._run, name="invivo-harvest", daemon=True)
        self._thread.start()

    def add(
        self,
        prompt: int,
        prompt_ids: bytes,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        columns: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Take in the rows of one prompt; waits while there is no room.

        Args:
            prompt: its number.
            prompt_ids: all of its tokens, as 32-bit numbers.
            token_ids: the token of each row.
            positions: its place in the prompt.
            columns: for each column of the plan the rows, in pieces.

        Raises:
            MisuseError: rows that do not fit the columns, or an earlier shard could not be written.
        """
        count = len(token_ids)
        if not count:
            return
        _check(self.plan, columns, count)
        if self._buffer is not None and self._buffer.rows + count > self.plan.capacity:
            self._pass_on()
        if self._buffer is None:
            self._buffer = self._free.get()
        if self._error is not None:
            raise self._error
        self._buffer.add(prompt, prompt_ids, token_ids, positions, columns)

    def close(self) -> None:
        """Write what is there and wait until it is on its way to the disk.

        Raises:
            MisuseError: a shard could not be written.
        """
        self._pass_on()
        self._full.put(None)
        self._thread.join()
        os.close(self._lock)
        if self._error is not None:
            raise self._error

    def _pass_on(self) -> None:
        """Give the buffer that is being filled to the thread; a block may be ended between any two of these lines."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and buffer.rows:
            self._full.put(buffer)

    def _run(self) -> None:
        with suppress(OSError):  # priorities are per thread in Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (buffer := self._full.get()) is not None:
            try:
                if self._error is None:
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
    """Room for the rows of one shard."""

    def __init__(self, plan: Plan, pinned: bool) -> None:
        rows = plan.capacity
        self._plan = plan
        self._pinned = pinned
        # Not touched before it is needed: a harvest of a few rows holds the memory of a few rows.
        self._columns = [
            torch.empty((rows, *column.shape), dtype=column.torch_dtype, pin_memory=pinned) for column in plan.columns
        ]
        self._prompt = torch.empty(rows, dtype=torch.int64)
        self._token_id = torch.empty(rows, dtype=torch.int32)
        self._position = torch.empty(rows, dtype=torch.int32)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._prompts: list[_Prompt] = []

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._prompts[-1].end if self._prompts else 0

    def clear(self) -> None:
        """Forget all rows; the memory stays, since what is written for the first time is slow."""
        self._prompts = []

    def add(
        self,
        prompt: int,
        prompt_ids: bytes,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        columns: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Copy the rows of a prompt."""
        start, end = self.rows, self.rows + len(token_ids)
        for buffer, pieces in zip(self._columns, columns, strict=True):
            at = start
            for piece in pieces:
                buffer[at : at + len(piece)].copy_(piece, non_blocking=self._pinned)
                at += len(piece)
        self._prompt[start:end] = prompt
        self._token_id[start:end] = token_ids
        self._position[start:end] = positions
        if self._copied is not None:  # behind the last copy, in the stream of the model
            self._copied.record()
        self._prompts.append(_Prompt(prompt, start, end, hashlib.sha256(prompt_ids).digest()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the shard holds, by name."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = self.rows
        found = {column.name: self._columns[at][:rows] for at, column in enumerate(self._plan.columns)}
        digests = bytearray(b"".join(prompt.digest for prompt in self._prompts))
        return found | {
            "prompt": self._prompt[:rows],
            "token_id": self._token_id[:rows],
            "position": self._position[:rows],
            "prompts.number": torch.tensor([prompt.number for prompt in self._prompts]),
            "prompts.start": torch.tensor([prompt.start for prompt in self._prompts]),
            "prompts.sha256": torch.frombuffer(digests, dtype=torch.uint8).reshape(-1, 32),
        }


def _check(plan: Plan, columns: Sequence[Sequence[torch.Tensor]], count: int) -> None:
    """Assert that rows fit their columns: a copy would stretch a row that is alone."""
    if count > plan.capacity:
        raise InternalError(f"{count} rows of one prompt for shards of {plan.capacity}.")
    for column, pieces in zip(plan.columns, columns, strict=True):
        shapes = {tuple(piece.shape[1:]) for piece in pieces}
        rows = sum(len(piece) for piece in pieces)
        if shapes != {column.shape} or rows != count:
            raise MisuseError(
                f"`{column.name}` gave {rows} rows of the shape {sorted(shapes)}, and {count} of the shape "
                f"{list(column.shape)} were due: only ports with one row per token can be harvested."
            )


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
