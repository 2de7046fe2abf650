"""Values on their way home: saved values as bytes that are read, never executed.

A client must be able to read what an engine on another machine sends without trusting it, so nothing here is
pickled: the bytes are msgpack in the format of `nodes`. Tensors and arrays are copied once when they are
packed and once when they are unpacked, into the memory that the new tensor owns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..envoy.errors import InternalError, SaveError
from .node_reader import Reader
from .node_writer import Unsupported, Writer
from .nodes import VERSION, Message

if TYPE_CHECKING:
    from collections.abc import Mapping


def pack(saves: Mapping[str, object]) -> bytes:
    """Turns saved values into bytes.

    Args:
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
        return _encoder.encode(Message(VERSION, tree, writer.buffers))
    except RecursionError:
        raise SaveError(f"`{'`, `'.join(saves)}` cannot be saved: nested too deeply.") from None
    except (ValueError, OverflowError) as error:
        raise SaveError(f"`{'`, `'.join(saves)}` cannot be saved: {error}.") from None


def unpack(data: bytes | bytearray | memoryview) -> dict[str, object]:
    """Reads what `pack` wrote. Tensors are on the CPU, own their memory and may be written to.

    Raises:
        InternalError: the bytes are not what `pack` writes. Nothing is executed, whatever they are.
    """
    try:
        message = _decoder.decode(data)
        if message.version != VERSION:
            raise ValueError(f"format {message.version}, expected {VERSION}")
        reader = Reader(message.buffers)
        return {name: reader.value(node) for name, node in message.tree}
    except Exception as error:  # hostile bytes may fail in any way; all of them mean the same to the caller
        what = f"{type(error).__name__}: {error}"
        raise InternalError(f"The values that the engine sent cannot be read: {what}") from error


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
