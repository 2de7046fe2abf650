"""The files of shared memory in which large saves wait, and those that a GPU copies to by itself.

A GPU copies to ordinary memory at a quarter of its rate, with the processor at work all the time, and memory that is
touched for the first time costs ten times as much again. So a file for what is on a GPU is locked in memory, and is
used again once the client has let go of all that was in it, which a byte in the file says. Locking costs as much as
first touching, and holds up every other thread that talks to the GPU, so it is done in parts.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..interleaver.torch_compat import copy_each
from .parcel import FILE_NAME, LENT, Lending

PART = 8 << 20
"""Bytes of a file that are locked at a time; no copy goes over the border of two parts."""

_MOST = 4 << 30
"""What all files may take that are kept for another use."""

_MOST_FILES = 128

_STEPS = 4
"""Sizes between a power of two and the next one, so that files fit more than one set of saves."""

Copy = tuple[torch.Tensor, torch.Tensor]
"""A place in memory, and the bytes on the device that are to be there."""


class Pending(Protocol):
    """What a device was told to do; a `torch.cuda.Event` is one. Both raise `RuntimeError` if it failed."""

    def query(self) -> bool:
        """Whether it is done."""
        ...

    def synchronize(self) -> object:
        """Wait until it is done."""
        ...


class Copier(Protocol):
    """What copies from a device to memory that was locked for it."""

    def lock(self, memory: torch.Tensor) -> None:
        """Lock memory. Raises `RuntimeError`."""
        ...

    def unlock(self, memory: torch.Tensor) -> None:
        """Undo `lock`."""
        ...

    def mark(self) -> Pending:
        """What the device was told to do so far."""
        ...

    def start(self, copies: Sequence[Copy], after: Any) -> Pending:
        """Start copies from one device, which begin at a mark."""
        ...


class Cuda:
    """See `Copier`. Copies have a stream of their own, so that they go on while the model runs."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def lock(self, memory: torch.Tensor) -> None:
        """See `Copier`."""
        runtime, done = _runtime(), list[int]()
        for start in range(0, memory.numel(), PART):
            place, size = memory.data_ptr() + start, min(PART, memory.numel() - start)
            error = runtime.cudaHostRegister(place, size, 0)
            if int(error):
                for locked in done:
                    runtime.cudaHostUnregister(locked)
                raise RuntimeError(f"{error} for {size} bytes")
            done.append(place)

    def unlock(self, memory: torch.Tensor) -> None:
        """See `Copier`."""
        runtime = _runtime()
        for start in range(0, memory.numel(), PART):
            runtime.cudaHostUnregister(memory.data_ptr() + start)

    def mark(self) -> torch.cuda.Event:
        """See `Copier`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start(self, copies: Sequence[Copy], after: torch.cuda.Event) -> torch.cuda.Event:
        """See `Copier`."""
        device = copies[0][1].device
        if any(source.device != device for _, source in copies):
            raise RuntimeError("they are on several devices")
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._streams[device]), torch.no_grad():
                self._streams[device].wait_event(after)
                # One call: between two, the thread may have to wait for Python's lock.
                copy_each([place for place, _ in copies], [source for _, source in copies], non_blocking=True)
                over.record()
        return over


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class File:
    """A file that has no name; the kernel frees it with its last user.

    Args:
        size: of the file.
        lends: it may be used again.

    Attributes:
        memory: it, mapped and locked; None before.
        since: when it was last used.
    """

    def __init__(self, size: int, *, lends: bool = False) -> None:
        self.memory: torch.Tensor | None = None
        self.lends = lends
        self.since = 0.0
        self.size = size
        self._copier: Copier | None = None
        self.fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self.inode = os.fstat(self.fd).st_ino
            os.ftruncate(self.fd, size)
            # A file that cannot shrink cannot take the ground from under the client's feet.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def free(self) -> bool:
        """Whether the client has let go of all that was in it."""
        return self.lends and os.pread(self.fd, 1, LENT)[0] == Lending.RETURNED

    def lock(self, copier: Copier) -> torch.Tensor:
        """Lock it in memory, if it is not. Raises `RuntimeError`."""
        if self.memory is None:
            with torch.inference_mode(False):
                path = f"/proc/self/fd/{self.fd}"
                memory = torch.from_file(path, shared=True, size=self.size, dtype=torch.uint8, device="cpu")
            copier.lock(memory)
            self.memory, self._copier = memory, copier
        return self.memory

    def close(self) -> None:
        """Close the worker's end."""
        if self.memory is not None and self._copier is not None:
            self._copier.unlock(self.memory)
        self.memory = None
        os.close(self.fd)


class Files:
    """Those that are used again: lent to clients, or free."""

    def __init__(self) -> None:
        self._kept: list[File] = []

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, size: int) -> File:
        """A free one of at least this size, or a new one. Raises `OSError`."""
        room = _rounded(size)
        for at, file in enumerate(self._kept):
            if file.size == room and file.free:
                return self._kept.pop(at)
        return File(room, lends=True)

    def keep(self, file: File, now: float) -> list[File]:
        """Keep one, which is lent or free. Gives those that are to be closed for that."""
        file.since = now
        self._kept.append(file)
        total = sum(one.size for one in self._kept)
        gone = []
        while total > _MOST or len(self._kept) > _MOST_FILES:
            gone.append(self._kept.pop(0))
            total -= gone[-1].size
        return gone

    def unused(self, before: float) -> list[File]:
        """Take out those that were not used since then."""
        gone = [file for file in self._kept if file.since < before]
        self._kept = [file for file in self._kept if file.since >= before]
        return gone


def _rounded(size: int) -> int:
    step = max(1 << max(size.bit_length() - 1, 0), _STEPS) // _STEPS
    return -(-size // step) * step
