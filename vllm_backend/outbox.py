"""The worker's side of large saves: copies them into shared memory while the model goes on.

The model's thread only makes the file and the ticket. One thread copies, a slice at a time and without Python's lock,
at a low priority; it ends when nothing waits any more. The worker keeps its end of a file open until the copy is done
and the client has opened the file, which a byte in the file says: no call is needed for it.

What is on a GPU is copied by that, into files that are used again (`lent_files`). Nobody waits for it but the thread,
and the client. These files stay for some seconds after they were last used.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import torch
from msgspec import structs

from ..envoy.errors import InternalError
from ..tracer.backend import Reply
from ..tracer.buffers import OnDevice, Piece, at_home
from ..tracer.results import Packed, Unsent
from .lent_files import PART, Copier, Copy, Cuda, File, Files, Pending
from .parcel import ERROR, HEADER, LENT, NOTHING, STATE, TAKEN, THRESHOLD, TOKEN_BYTES, Lending, Parcel, State, Ticket

_SLICE = 4 << 20
_PAUSE = 0.05

_SOON = 0.0005
"""Between two looks whether a device has copied what it was told to."""

_SECONDS = 60.0
"""How long saves wait for a client that does not come for them, after the copy or its last call."""

_KEPT_SECONDS = 15.0
"""How long a file is kept for another use."""

_IDLE = 1.0
"""Between two looks for files that were not used for long."""

_NICENESS = 10

_log = logging.getLogger(__name__)


class Outbox:
    """What waits in one worker to be fetched. Its methods are called from the model's thread.

    Args:
        home: this worker sends; of several that have the same blocks only one does.
        copier: copies what is on a device.
    """

    def __init__(self, *, home: bool = True, copier: Copier | None = None) -> None:
        self._home = home
        self._copier = copier or Cuda()
        self._files = Files()
        self._waiting: dict[str, _Offer] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, trace: str, reply: Reply, *, held: bool = False) -> bytes:
        """The encoded parcel of a reply; large saves are put into shared memory from now on, on another thread.

        Nothing where another worker sends the same. Saves that are held wait for as long as it takes, until `release`.
        """
        if not self._home:
            return b""
        if reply.saves.nbytes <= THRESHOLD:
            return _whole(reply)
        try:
            offer = self._offer(reply.saves)
        except OSError as error:
            _log.warning("invivo sends %d bytes in a message: no shared memory (%s)", reply.saves.nbytes, error)
            return _whole(reply)
        offer.held = held
        with self._changed:
            before = self._waiting.pop(trace, None)
            if before is not None:  # this takes its place; the thread closes it
                before.dropped = True
                self._waiting[f"{trace}, before {offer.ticket.inode}"] = before
            self._waiting[trace] = offer
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="invivo-outbox", daemon=True)
                self._thread.start()
            self._changed.notify()
        return msgspec.msgpack.encode(Parcel(structs.replace(reply, saves=NOTHING), offer.ticket))

    def fetch(self, trace: str, start: int, count: int) -> bytes | None:
        """Bytes of the file, for a client that cannot open it; None if no saves of the trace wait (any more)."""
        with self._changed:
            offer = self._waiting.get(trace)
            return None if offer is None or offer.dropped else offer.read(start, count)

    def release(self, trace: str) -> None:
        """The client knows of the saves of a trace: they wait for it no longer than others."""
        with self._changed:
            if trace in self._waiting:
                self._waiting[trace].release()

    def drop(self, trace: str) -> None:
        """Forget the saves of a trace: they have been fetched, or its caller has given up."""
        with self._changed:
            if trace in self._waiting:
                self._waiting[trace].dropped = True
                self._changed.notify()

    def check_integrity(self) -> None:
        """Assert that nothing waits to be fetched. Raises `InternalError`."""
        with self._changed:
            left = [trace for trace, offer in self._waiting.items() if not (offer.dropped or offer.taken)]
        if left:
            raise InternalError(f"the saves of {len(left)} traces were not fetched.")

    def _offer(self, saves: Packed) -> _Offer:
        if not isinstance(saves, Unsent):
            return _Offer([memoryview(saves.head), *saves.buffers], File)
        copier = self._copier
        with self._changed:  # the thread puts files back
            return _Offer([memoryview(saves.head), *saves.pieces], self._files.take, copier, copier.mark())

    def _run(self) -> None:
        with suppress(OSError):  # priorities are per thread in Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                left = [offer for offer in self._waiting.values() if not offer.copied]
                new = [offer for offer in left if not offer.begun]
                offer = next((offer for offer in left if offer.begun and offer.ready), None)
                gone = [] if left else self._put_back()
                if not (self._waiting or len(self._files) or gone):
                    self._thread = None
                    return
                if not new and offer is None and not gone:
                    self._changed.wait(_SOON if left else _PAUSE if self._waiting else _IDLE)
            for file in gone:
                file.close()
            for one in new:
                one.begin()
            if offer is not None:
                offer.copy()

    def _put_back(self) -> list[File]:
        """Forget what was fetched, or waits in vain. Gives the files that are to be closed."""
        now, gone = time.monotonic(), []
        for trace in [trace for trace, offer in self._waiting.items() if offer.over]:
            file = self._waiting.pop(trace).end()
            gone += self._files.keep(file, now) if file.lends else [file]
        return gone + self._files.unused(now - _KEPT_SECONDS)


def _whole(reply: Reply) -> bytes:
    """A parcel with everything in it."""
    if isinstance(reply.saves, Unsent):
        reply = structs.replace(reply, saves=reply.saves.at_home())
    return msgspec.msgpack.encode(Parcel(reply, None))


class _Offer:
    """Saves on their way into a file, and the file.

    Only the thread that copies closes it: a number that is closed while it is written to may stand for another file.

    Args:
        pieces: the head of the saves, and the elements of their tensors and arrays.
        make: gives a file of at least some size.
        copier: copies those pieces that are on a device; None if there are none.
        after: when these are there.

    Attributes:
        dropped: nobody wants the saves any more; a copy that goes on stops.
        begun: the device was told to copy what it has.
        held: nobody knows of the saves yet.
    """

    def __init__(
        self, pieces: list[Piece], make: Callable[[int], File], copier: Copier | None = None, after: Any = None
    ) -> None:
        self._pieces: list[Piece | None] = [*pieces]
        self._copier, self._after = copier, after
        self._sending: Pending | None = None
        self._sent: list[OnDevice] = []
        self.begun = copier is None
        self.dropped = self.held = False
        self._deadline = float("inf")
        sizes = tuple(map(len, pieces))
        token = secrets.token_bytes(TOKEN_BYTES)
        ticket = Ticket(os.getpid(), 0, 0, token, sizes)
        self._places = ticket.places
        self._file = make(self._places[-1])
        self._fd = self._file.fd
        self.ticket = structs.replace(ticket, fd=self._fd, inode=self._file.inode)
        try:
            os.pwrite(self._fd, token.ljust(HEADER, b"\0"), 0)
            self._lend(Lending.LENT if self._file.lends else Lending.GIVEN)
        except BaseException:
            self._file.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether `copy` need not wait for the device."""
        try:
            return self._sending is None or self._sending.query()
        except RuntimeError:
            return True  # `copy` says so

    @property
    def copied(self) -> bool:
        """Whether the copy has been done, or has failed."""
        return not self._pieces

    @property
    def taken(self) -> bool:
        """Whether the client has opened the file."""
        return os.pread(self._fd, 1, TAKEN) != b"\0"

    @property
    def over(self) -> bool:
        """Whether the worker's end of the file can be closed."""
        late = time.monotonic() > self._deadline and not self.held
        return self.copied and (self.dropped or self.taken or late)

    def release(self) -> None:
        """It is not held any more."""
        self.held = False
        self._deadline = max(self._deadline, time.monotonic() + _SECONDS)

    def begin(self) -> None:
        """Have the device copy what it has."""
        copier, self.begun = self._copier, True
        assert copier is not None, "else there is nothing to begin"
        try:
            if not self.dropped:
                away = [(at, piece) for at, piece in enumerate(self._pieces) if isinstance(piece, OnDevice)]
                memory = self._file.lock(copier)
                copies = [copy for at, piece in away for copy in _copies(memory, self._places[at], piece)]
                self._sending = copier.start(copies, self._after)
                self._sent = [piece for _, piece in away]
                for at, _ in away:
                    self._pieces[at] = None
        except Exception as error:
            _log.warning("invivo copies saved values from the device one by one: %s", error)
            self._file.lends = False

    def copy(self) -> None:
        """Copy everything, and let go of each piece once it is copied."""
        try:
            for start, part in self._parts():
                if self.dropped:
                    return
                _write(self._fd, part, start)
            self._wait()
            self._mark(State.DONE)
        except Exception as error:
            _log.exception("invivo cannot copy saved values into shared memory")
            self._mark(State.FAILED, getattr(error, "errno", None) or errno.EIO)
        finally:
            self._let_go()

    def _wait(self) -> None:
        if self._sending is not None:
            self._sending.synchronize()

    def _let_go(self) -> None:
        """Let go of the saves, when the device has done what it was told."""
        with suppress(Exception):  # it was raised before
            self._wait()
        self._pieces.clear()
        self._sent.clear()
        self._deadline = time.monotonic() + _SECONDS

    def _parts(self) -> Iterator[tuple[int, memoryview]]:
        for index, place in enumerate(self._places[:-1]):
            piece = self._pieces[index]
            if isinstance(piece, OnDevice):  # it could not be told to copy
                self._after.synchronize()
                (piece,) = at_home([piece])
            for start in range(0, len(piece) if piece is not None else 0, _SLICE):
                yield place + start, piece[start : start + _SLICE]  # type: ignore[index]  # there is one
            self._pieces[index] = None

    def _mark(self, state: State, number: int = 0) -> None:
        os.pwrite(self._fd, bytes([number & 0xFF]), ERROR)
        os.pwrite(self._fd, bytes([state]), STATE)

    def read(self, start: int, count: int) -> bytes:
        """Bytes of the file as far as it is written."""
        if self.copied:
            self._deadline = time.monotonic() + _SECONDS
        return os.pread(self._fd, count, start)

    def end(self) -> File:
        """The file, when it is `over`: free, lent to the client, or to be closed."""
        file = self._file
        if file.lends and not self.taken:
            if self.dropped:
                self._lend(Lending.RETURNED)
            else:
                file.lends = False  # the client may still come
        return file

    def _lend(self, state: Lending) -> None:
        os.pwrite(self._fd, bytes([state]), LENT)


def _copies(memory: torch.Tensor, place: int, piece: OnDevice) -> Iterator[Copy]:
    """The copies of a piece to its place: one for each part of the file."""
    begin, end = place, place + len(piece)
    while place < end:
        stop = min(end, (place // PART + 1) * PART)
        yield memory[place:stop], piece.bytes[place - begin : stop - begin]
        place = stop


def _write(fd: int, data: memoryview, start: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, start)
        data, start = data[written:], start + written
