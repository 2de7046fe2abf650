"""Values on their way home: saved values as bytes that are read, never executed.

A client must be able to read what an engine on another machine sends without trusting it, so nothing here is
pickled: the head is msgpack in the format of `nodes`, and the elements of tensors and arrays are raw buffers
beside it. Packing copies none of them, so that whoever sends a `Packed` decides when and how they are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..envoy.errors import InternalError, SaveError
from .buffers import OnDevice, Piece, at_home
from .node_reader import Reader
from .node_writer import Unsupported, Writer
from .nodes import VERSION, Message

if TYPE_CHECKING:
    from collections.abc import Mapping


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """Saved values, ready to be sent.

    Attributes:
        head: the names, and the values but for the elements of tensors and arrays.
        buffers: those elements, as flat views of bytes. As `pack` makes them they are read-only and share the
            memory of the values, which must not change until they are sent.
    """

    head: bytes
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return len(self.head) + sum(len(buffer) for buffer in self.buffers)


class Unsent(Packed, frozen=True, array_like=True):
    """Saved values of which some are still on a device; whoever sends them has them brought home.

    Attributes:
        pieces: in the place of `buffers`, which has none.
    """

    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return len(self.head) + sum(map(len, self.pieces))

    def at_home(self) -> Packed:
        """Them, on the host."""
        return Packed(self.head, at_home(self.pieces))


class Opened(Packed, frozen=True, array_like=True):
    """Saved values that have been read.

    Attributes:
        values: by name.
    """

    values: dict[str, object]


def opened(packed: Packed) -> Opened:
    """Reads saved values ahead of `unpack`, which takes them then. Raises as it does."""
    return Opened(packed.head, packed.buffers, unpack(packed))


def pack(saves: Mapping[str, object], *, later: bool = False) -> Packed:
    """Turns saved values into a head and buffers.

    Args:
        later: leave what is on a device there (`Unsent`).
        saves: values by name. Supported are None, bool, int, float, complex, str, bytes, bytearray, range,
            slice; list, tuple, dict, set, frozenset, OrderedDict, defaultdict, Counter, deque of supported
            values; tensors of any device and shape; torch.Size, torch.dtype, torch.device,
            torch.return_types; numpy arrays and scalars.

    Raises:
        SaveError: a value of another type; the message names it with its path, such as ``hs[3]["x"]``.
    """
    writer = Writer()
    tree = []
    for name, value in saves.items():
        try:
            tree.append((name, writer.node(value)))
        except Unsupported as error:
            raise SaveError(f"`{name}{error.path()}` cannot be saved: {error.reason}.") from None
        except RecursionError:
            raise SaveError(f"`{name}` cannot be saved: it is nested too deeply.") from None
    try:
        head = _encoder.encode(Message(VERSION, tree))
    except RecursionError:
        raise SaveError(f"`{'`, `'.join(saves)}` cannot be saved: nested too deeply.") from None
    except (ValueError, OverflowError) as error:
        raise SaveError(f"`{'`, `'.join(saves)}` cannot be saved: {error}.") from None
    unsent = Unsent(head, [], writer.buffers)
    return unsent if later and any(isinstance(piece, OnDevice) for piece in unsent.pieces) else unsent.at_home()


def unpack(packed: Packed) -> dict[str, object]:
    """Reads what `pack` wrote. Tensors are on the CPU, own their memory and may be written to.

    A read-only buffer is copied. A writable one is the receiver's own: its value is made on it without a copy,
    and keeps it alive.

    Raises:
        InternalError: the bytes are not what `pack` writes. Nothing is executed, whatever they are.
    """
    if isinstance(packed, Opened):
        return packed.values
    try:
        message = _messages.decode(packed.head)
        if message.version != VERSION:
            raise ValueError(f"format {message.version}, expected {VERSION}")
        reader = Reader(packed.buffers)
        return {name: reader.value(node) for name, node in message.tree}
    except Exception as error:  # hostile bytes may fail in any way; all of them mean the same to the caller
        raise _unreadable(error) from error


def to_bytes(saves: Mapping[str, object]) -> bytes:
    """`pack` as one piece; raises `SaveError`."""
    return _encoder.encode(pack(saves))


def from_bytes(data: bytes | bytearray | memoryview) -> dict[str, object]:
    """Reads what `to_bytes` wrote; raises `InternalError`. The values share no memory with `data`."""
    try:
        packed = _packed.decode(memoryview(data).toreadonly())
    except Exception as error:
        raise _unreadable(error) from error
    return unpack(packed)


def _unreadable(error: Exception) -> InternalError:
    return InternalError(f"The values that the engine sent cannot be read: {type(error).__name__}: {error}")


_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(Message)
_packed = msgspec.msgpack.Decoder(Packed)
