"""The worker's side of large saves: copies them into shared memory while the model goes on.

The model's thread only makes the file and the ticket. One thread copies, a slice at a time and without Python's lock,
at a low priority; it ends when nothing waits any more. The worker keeps its end of a file open until the copy is done
and the client has opened the file, which a byte in the file says: no call is needed for it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from msgspec import structs

from ..envoy.errors import InternalError
from ..tracer.backend import Reply
from ..tracer.results import Packed
from .parcel import ERROR, FILE_NAME, NOTHING, STATE, TAKEN, THRESHOLD, TOKEN_BYTES, Parcel, State, Ticket

_SLICE = 4 << 20
_PAUSE = 0.05
_SECONDS = 60.0
"""How long saves wait for a client that does not come for them, after the copy or its last call."""

_NICENESS = 10

_log = logging.getLogger(__name__)


class Outbox:
    """What waits in one worker to be fetched. Its methods are called from the model's thread.

    Args:
        home: this worker sends; of several that have the same blocks only one does.
    """

    def __init__(self, *, home: bool = True) -> None:
        self._home = home
        self._waiting: dict[str, _Offer] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, trace: str, reply: Reply) -> bytes:
        """The encoded parcel of a reply; large saves are put into shared memory from now on, on another thread.

        Nothing where another worker sends the same.
        """
        if not self._home:
            return b""
        if reply.saves.nbytes <= THRESHOLD:
            return msgspec.msgpack.encode(Parcel(reply, None))
        try:
            offer = _Offer(reply.saves)
        except OSError as error:
            _log.warning("invivo sends %d bytes in a message: no shared memory (%s)", reply.saves.nbytes, error)
            return msgspec.msgpack.encode(Parcel(reply, None))
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

    def _run(self) -> None:
        with suppress(OSError):  # priorities are per thread in Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                for trace in [trace for trace, offer in self._waiting.items() if offer.over]:
                    self._waiting.pop(trace).close()
                if not self._waiting:
                    self._thread = None
                    return
                offer = next((offer for offer in self._waiting.values() if not offer.copied), None)
                if offer is None:
                    self._changed.wait(_PAUSE)
            if offer is not None:
                offer.copy()


class _Offer:
    """Saves on their way into a file, and the file.

    Only the thread that copies closes it: a number that is closed while it is written to may stand for another file.

    Attributes:
        dropped: nobody wants the saves any more; a copy that goes on stops.
    """

    def __init__(self, saves: Packed) -> None:
        self._pieces: list[memoryview | None] = [memoryview(saves.head), *saves.buffers]
        sizes = tuple(len(piece) for piece in self._pieces if piece is not None)
        self.dropped = False
        self._deadline = float("inf")
        self._fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            token = secrets.token_bytes(TOKEN_BYTES)
            self.ticket = Ticket(os.getpid(), self._fd, os.fstat(self._fd).st_ino, token, sizes)
            os.ftruncate(self._fd, self.ticket.places[-1])
            # A file that cannot shrink cannot take the ground from under the client's feet.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            os.pwrite(self._fd, token, 0)
        except BaseException:
            os.close(self._fd)
            raise

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
        return self.dropped or (self.copied and (self.taken or time.monotonic() > self._deadline))

    def copy(self) -> None:
        """Copy everything, and let go of each piece once it is copied."""
        try:
            for start, part in self._parts():
                if self.dropped:
                    return
                _write(self._fd, part, start)
            self._mark(State.DONE)
        except Exception as error:
            _log.exception("invivo cannot copy saved values into shared memory")
            self._mark(State.FAILED, getattr(error, "errno", None) or errno.EIO)
        finally:
            self._pieces.clear()
            self._deadline = time.monotonic() + _SECONDS

    def _parts(self) -> Iterator[tuple[int, memoryview]]:
        for index, place in enumerate(self.ticket.places[:-1]):
            piece = self._pieces[index]
            assert piece is not None, "every piece is copied once"
            for start in range(0, len(piece), _SLICE):
                yield place + start, piece[start : start + _SLICE]
            self._pieces[index] = None

    def _mark(self, state: State, number: int = 0) -> None:
        os.pwrite(self._fd, bytes([number & 0xFF]), ERROR)
        os.pwrite(self._fd, bytes([state]), STATE)

    def read(self, start: int, count: int) -> bytes:
        """Bytes of the file as far as it is written."""
        if self.copied:
            self._deadline = time.monotonic() + _SECONDS
        return os.pread(self._fd, count, start)

    def close(self) -> None:
        """Close the worker's end."""
        os.close(self._fd)


def _write(fd: int, data: memoryview, start: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, start)
        data, start = data[written:], start + written
