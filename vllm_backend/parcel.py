"""How a reply crosses from the worker to the client: whole, or as a ticket for saves that wait in shared memory.

Large saves as bytes in a message would stop the engine for as long as they are copied from process to process. A
parcel with a ticket is small: the saves are in an anonymous file of the worker (`outbox`), which a client on the same
host opens through ``/proc`` and maps (`pickup`). The file has no name, so the kernel frees it with its last user,
however that one ends.

The file begins with a header; then come the head of the saves and their buffers, each at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import accumulate

import msgspec

from ..tracer.backend import Reply
from ..tracer.results import Packed

THRESHOLD = 1 << 20
"""Saves of more bytes than this in all wait in shared memory."""

FILE_NAME = "invivo-saves"
"""What ``/proc`` shows as the name of the file; it is in no folder."""

HEADER = 64
"""Bytes before the saves: the token, then single bytes at the places below."""

TOKEN_BYTES = 16
STATE = 16  # a `State`, written by the worker
TAKEN = 17  # not zero when the client has opened the file, written by the client
ERROR = 18  # number of the error for which the copy failed, written by the worker
LENT = 19  # a `Lending`

ALIGNMENT = 64


class State(IntEnum):
    """How far the worker is with its copy."""

    COPYING = 0
    DONE = 1
    FAILED = 2


class Lending(IntEnum):
    """Whether a file is used again."""

    GIVEN = 0
    """It is not."""

    LENT = 1
    """It is, when the client has let go of all that is in it; written by the worker."""

    RETURNED = 2
    """The client has; written by the client, or by the worker where no client came."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Where saves wait.

    Attributes:
        pid: the worker's process.
        fd: the number of the file in it.
        inode: of the file; with `token`, it tells the file from another one under the same numbers.
        token: random bytes at the beginning of the file.
        sizes: bytes of the head and of every buffer.
    """

    pid: int
    fd: int
    inode: int
    token: bytes
    sizes: tuple[int, ...]

    @property
    def places(self) -> list[int]:
        """Where the head and the buffers begin, and where the last one ends."""
        return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes), initial=HEADER))


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """A reply as it is sent; with a ticket, the saves in it are empty."""

    reply: Reply
    ticket: Ticket | None


NOTHING = Packed(b"", [])
"""The saves of a reply whose own are in shared memory."""
