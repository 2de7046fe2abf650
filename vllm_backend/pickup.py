"""The client's side of large saves: finds them in shared memory, and makes the values on that memory.

A client that cannot open the worker's file (it is on another host, in another namespace of processes, or belongs to
another user) asks for the bytes in slices, between which the engine decodes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import torch
from msgspec import structs

from ..envoy.errors import EngineDiedError, InternalError, SaveError
from ..tracer.backend import Reply
from ..tracer.results import Packed
from .parcel import ERROR, FILE_NAME, HEADER, LENT, STATE, TAKEN, TOKEN_BYTES, Lending, Parcel, State, Ticket

_PAUSE = 0.001
_SLICE = 1 << 20
_SLICE_PAUSE = 0.05
"""Between two questions whether the copy is done: each one is a call into the engine."""

_MAPPED = 64 << 10
"""Smaller buffers are copied, so that a small tensor which is kept does not keep all the others."""

_MOST = 1 << 48
_SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_log = logging.getLogger(__name__)


class Elsewhere(Exception):
    """The file of a ticket cannot be opened here; says why."""


def receive(data: bytes, trace: str, call: Callable[..., Any]) -> Reply:
    """The reply in an encoded parcel, with its saves, wherever they are.

    Args:
        data: what `Outbox.send` made.
        trace: of which trace.
        call: calls a method of the worker that made it.

    Raises:
        SaveError: the engine had no memory for the saves, or nobody fetched them for too long.
        EngineDiedError: the engine has died in the middle of its copy.
        InternalError: the parcel is not one.
    """
    return Arriving(data, trace, call).reply()


class Arriving:
    """A reply whose saves may still be on their way into a file, which is opened here.

    The arguments, and what making one and `reply` raise, are those of `receive`.
    """

    def __init__(self, data: bytes, trace: str, call: Callable[..., Any]) -> None:
        parcel = decoded(data)
        self._reply, self._ticket = parcel.reply, parcel.ticket
        self._memory = memoryview(b"")
        if self._ticket is None:
            return
        try:
            self._memory = opened(self._ticket)
        except Elsewhere as error:
            _warn_once(str(error))
            self._memory = _by_slices(self._ticket, trace, call)

    def reply(self) -> Reply:
        """The reply with all its saves, for which this waits."""
        if self._ticket is None:
            return self._reply
        while not is_done(self._ticket, self._memory):
            time.sleep(_PAUSE)
        return completed(self._reply, self._ticket, self._memory)


def decoded(data: bytes) -> Parcel:
    """The parcel in its bytes. Raises `InternalError` if it is not one, or its ticket says what none can."""
    try:
        parcel = _decoder.decode(data)
    except Exception as error:  # as in `results`: hostile bytes may fail in any way
        raise InternalError(f"The reply of the engine cannot be read: {error}") from error
    ticket = parcel.ticket
    if ticket is not None and (not ticket.sizes or min(ticket.sizes) < 0 or ticket.places[-1] > _MOST):
        raise InternalError(f"The engine sent a ticket for saves of the sizes {ticket.sizes[:5]}.")
    return parcel


def opened(ticket: Ticket) -> memoryview:
    """The file of a ticket, mapped for reading and writing for as long as the view or a part of it is there.

    The mapping is shared with the worker, which closes its end when the copy is done. A private one would copy each
    page at the first write to it, which takes several times as long as copying everything at once.

    Raises:
        Elsewhere: there is no such file here, or it is another one.
    """
    path, size = _path(ticket), ticket.places[-1]
    try:
        # The name and the kind first: to open a pipe or a device can have effects.
        if os.readlink(path) != f"/memfd:{FILE_NAME} (deleted)" or not stat.S_ISREG(os.stat(path).st_mode):
            raise Elsewhere("what the ticket names is not the engine's file")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise Elsewhere(f"the engine's file cannot be opened ({error.strerror})") from error
    try:
        found = os.fstat(fd)
        lent = os.pread(fd, 1, LENT) == bytes([Lending.LENT])  # then it may be larger
        same = found.st_ino == ticket.inode and (found.st_size == size or (lent and found.st_size > size))
        if not same or len(ticket.token) != TOKEN_BYTES or os.pread(fd, TOKEN_BYTES, 0) != ticket.token:
            raise Elsewhere("what the ticket names is not the engine's file")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALED != _SEALED:
            raise Elsewhere("the engine's file may shrink")
        memory = _map(fd, size)
        if lent:
            when_gone = weakref.finalize(memory.obj, _give_back, _map(fd, HEADER), _forks(), _forks().count)
            when_gone.atexit = False
        os.pwrite(fd, b"\1", TAKEN)
    except (OSError, RuntimeError) as error:
        raise Elsewhere(f"the engine's file cannot be mapped ({error})") from error
    finally:
        os.close(fd)
    return memory


class _Forks:
    """How often this process has forked. A child has its mappings, too, and nobody knows how long it needs them."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(before=self.note)

    def note(self) -> None:
        """The process forks."""
        self.count += 1


@cache
def _forks() -> _Forks:
    """Those since the first file was lent to this process."""
    return _Forks()


def _give_back(header: memoryview, forks: _Forks, before: int) -> None:
    """Nothing here is in a file any more: the worker may use it again."""
    if forks.count == before:
        header[LENT] = Lending.RETURNED


def _map(fd: int, size: int) -> memoryview:
    """A mapping by torch: that of Python's `mmap` keeps a file descriptor for as long as it lives."""
    with torch.inference_mode(False):
        path = f"/proc/self/fd/{fd}"
        array: Any = torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu").numpy()
    return memoryview(array)


def is_done(ticket: Ticket, memory: memoryview) -> bool:
    """Whether all saves are in the file.

    Raises:
        SaveError: there was no memory for them.
        EngineDiedError: the worker is gone, and the copy is not done.
    """
    there = _worker_has(ticket)  # asked first: the worker closes its end after it has written the state
    state = _state(ticket, memory)
    if state == State.COPYING and not there:
        raise EngineDiedError(
            "the engine's process has died while it copied the saved values; its own log says why. Make a new "
            "`VLLM(...)` to start another one."
        )
    return state == State.DONE


def _path(ticket: Ticket) -> str:
    return f"/proc/{ticket.pid}/fd/{ticket.fd}"


def _worker_has(ticket: Ticket) -> bool:
    try:
        return os.stat(_path(ticket)).st_ino == ticket.inode
    except OSError:
        return False


def _state(ticket: Ticket, header: memoryview | bytearray) -> int:
    if header[STATE] == State.FAILED:
        raise SaveError(
            f"the saved values ({sum(ticket.sizes) / 2**20:.0f} MiB) cannot come home: the engine could not copy them "
            f"into shared memory ({os.strerror(header[ERROR])}). Save less, or in several traces."
        )
    return header[STATE]


def _by_slices(ticket: Ticket, trace: str, call: Callable[..., Any]) -> memoryview:
    """The file, by calls."""

    def fetch(start: int, count: int) -> bytes:
        part = call("invivo_fetch", trace, start, count)
        if part is None:
            raise SaveError(
                "the saved values are gone: the engine keeps them for a minute after they were last asked for."
            )
        if type(part) is not bytes or len(part) != count:
            raise InternalError(f"The engine sent {len(part)} bytes of saves where {count} were asked for.")
        return part

    memory = bytearray(fetch(0, HEADER))
    while _state(ticket, memory) != State.DONE:
        time.sleep(_SLICE_PAUSE)
        memory[:] = fetch(0, HEADER)
    while (left := ticket.places[-1] - len(memory)) > 0:
        memory += fetch(len(memory), min(_SLICE, left))
    call("invivo_drop", trace)
    return memoryview(memory)


def completed(reply: Reply, ticket: Ticket, memory: memoryview) -> Reply:
    """The reply with its saves, which are in `memory` and keep it."""
    pieces = [memory[place : place + size] for place, size in zip(ticket.places, ticket.sizes, strict=False)]
    buffers = [piece if len(piece) >= _MAPPED else piece.toreadonly() for piece in pieces[1:]]
    return structs.replace(reply, saves=Packed(bytes(pieces[0]), buffers))


@cache
def _warn_once(why: str) -> None:
    _log.warning("invivo fetches large saves in slices, which is slower than through shared memory: %s", why)


_decoder = msgspec.msgpack.Decoder(Parcel)
