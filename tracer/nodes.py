"""The format of values on their way home; `node_writer` writes it, `node_reader` reads it.

A message is one msgpack array, ``[version, tree]``. None, booleans, numbers, strings and bytes stand in the
tree as they are; any other value is an array whose first entry is a `Tag`. Lists, dicts, tensors, ... are
numbered as they are first met, in the same order by writer and reader, so that a second occurrence is just a
number: identity survives, and so do lists that contain themselves. The elements of tensors and arrays are in
buffers beside the message: two views of one tensor are two values, at home as well. Each has a buffer of its own, but
for lists of small tensors of one dtype and shape, which is what a block saves that follows a decode: these are one
buffer, packed and unpacked with one call. Each of them is a value with a number of its own all the same.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 3
"""Version of the format; a message of another version is refused."""

Node = Any
"""A msgpack value: None, bool, int, float, str, bytes, or ``[tag, ...]``."""


class Tag(IntEnum):
    """First entry of a node that is not a plain value; the comment shows the rest of the node."""

    REF = 0  # number of a value met before
    LIST = 1  # items
    TUPLE = 2  # items
    DICT = 3  # keys, values
    SET = 4  # items
    FROZENSET = 5  # items
    INT = 6  # hexadecimal digits; only beyond 64 bits
    COMPLEX = 7  # real, imaginary
    BYTEARRAY = 8  # bytes
    RANGE = 9  # start, stop, step
    SLICE = 10  # start, stop, step
    ORDERED_DICT = 11  # keys, values
    DEFAULT_DICT = 12  # name of the factory or None, keys, values
    COUNTER = 13  # keys, values
    DEQUE = 14  # maxlen, items
    TENSOR = 15  # dtype, shape, index of the buffer
    SIZE = 16  # sizes
    DTYPE = 17  # name
    DEVICE = 18  # text
    ARRAY = 19  # numpy dtype, shape, index of the buffer
    SCALAR = 20  # numpy dtype, bytes
    NAMED = 21  # name of a type in torch.return_types, items
    ALIKE = 22  # dtype, shape with the number of tensors in front, index of the buffer; stands for all items of a list


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message: saved values by name."""

    version: int
    tree: list[tuple[str, Node]]


FACTORIES: dict[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (list, dict, set, tuple, int, float, str, bool, deque)
}
"""What a defaultdict may make its values with."""

NUMPY_DTYPE = r"[<>|=][biufcSUmM][0-9]+(\[[0-9A-Za-z]+\])?"
"""Numpy dtypes that travel, as `numpy.dtype.str` spells them: numbers, text, times; never objects."""
