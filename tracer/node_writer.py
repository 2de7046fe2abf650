"""Writes values as `nodes`."""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

from . import buffers
from .buffers import Piece, Refusal
from .nodes import FACTORIES, NUMPY_DTYPE, Node, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_PLAIN = frozenset({type(None), bool, float, str, bytes})
_MIN, _MAX = -(2**63), 2**63 - 1
_MANY, _SMALL = 4, 1 << 14
"""Lists of this many tensors, of at most so many elements each, are one buffer."""

_numpy_dtype = re.compile(NUMPY_DTYPE)


class Unsupported(Exception):
    """A value that cannot be written; gathers its path on the way out of the containers around it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    def path(self) -> str:
        """The value's place in the outermost container, such as ``[3]["x"]``."""
        return "".join(reversed(self.steps))


class Writer:
    """Builds the tree and the buffers of one message."""

    def __init__(self) -> None:
        self.buffers: list[Piece] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # numbers go by id, so whatever has one must stay alive
        self._open: set[int] = set()  # tuples and frozensets that are being written

    def node(self, value: Any) -> Node:
        """The node of `value`; raises `Unsupported`."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if _MIN <= value <= _MAX else [Tag.INT, f"{value:x}"]
        write = _WRITERS.get(kind)
        if write is not None:
            return self._numbered(value, write)
        if kind is complex:
            return [Tag.COMPLEX, value.real, value.imag]
        if kind is range or kind is slice:
            tag = Tag.RANGE if kind is range else Tag.SLICE
            return [tag, *map(self.node, (value.start, value.stop, value.step))]
        if buffers.is_tensor(value):
            return self._numbered(value, Writer._tensor)
        return self._library(value, kind)

    def _numbered(self, value: Any, write: Callable[[Writer, Any], Node]) -> Node:
        key = id(value)
        number = self._numbers.get(key)
        if number is not None:
            if key in self._open:
                raise Unsupported(f"a {type(value).__name__} that contains itself")
            return [Tag.REF, number]
        self._numbers[key] = len(self._numbers)
        self._kept.append(value)
        if not isinstance(value, tuple | frozenset):
            return write(self, value)
        self._open.add(key)
        node = write(self, value)
        self._open.discard(key)
        return node

    def items(self, values: Iterable[Any], step: Callable[[int], str] = "[{}]".format) -> list[Node]:
        """The nodes of `values`; `step` spells the place of one of them by its index."""
        values = list(values)
        kinds = set(map(type, values))
        if kinds <= _PLAIN or (kinds == {int} and min(values) >= _MIN and max(values) <= _MAX):
            return values
        alike = self._alike(values, kinds) if len(values) >= _MANY else None
        if alike is not None:
            return [alike]
        nodes, index = [], 0
        for run in self._runs(values, kinds):
            alike = self._alike(run, kinds) if _MANY <= len(run) < len(values) else None
            if alike is not None:
                nodes.append(alike)
                index += len(run)
                continue
            for value in run:
                try:
                    nodes.append(self.node(value))
                except Unsupported as error:
                    error.steps.append(step(index))
                    raise
                index += 1
        return nodes

    def _runs(self, values: list[Any], kinds: set[type]) -> list[list[Any]]:
        """Values one behind the other that may be alike: rows of a prompt, say, and those of single tokens."""
        torch = sys.modules.get("torch")
        if torch is None or kinds != {torch.Tensor}:
            return [values]
        try:
            return [[*run] for _, run in groupby(values, lambda tensor: (tensor.shape, tensor.dtype))]
        except (RuntimeError, NotImplementedError):  # one without a shape
            return [values]

    def _alike(self, values: list[Any], kinds: set[type]) -> Node | None:
        """One node for tensors that are small, of one dtype and shape, and not met before; None if they are not."""
        torch = sys.modules.get("torch")
        if torch is None or kinds != {torch.Tensor}:
            return None
        first, ids = values[0], [*map(id, values)]
        known = len(set(ids)) < len(ids) or not self._numbers.keys().isdisjoint(ids)
        if known or not 0 < first.numel() <= _SMALL or len({value.dtype for value in values}) > 1:
            return None
        try:
            with torch.no_grad():
                dtype, shape, piece = buffers.piece(torch.stack(values))
        except (RuntimeError, NotImplementedError, Refusal):  # of several shapes or devices, or without plain elements
            return None
        self._numbers.update(zip(ids, count(len(self._numbers)), strict=False))
        self._kept += values
        return [Tag.ALIKE, dtype, shape, self._buffer(piece)]

    def entries(self, value: Mapping[Any, Any]) -> tuple[list[Node], list[Node]]:
        """The nodes of the keys and of the values of a mapping."""
        keys = list(value)
        return (
            self.items(keys, lambda index: f" (key {_key(keys[index])})"),
            self.items(value.values(), lambda index: f"[{_key(keys[index])}]"),
        )

    def _tensor(self, value: Any) -> Node:
        try:
            dtype, shape, piece = buffers.piece(value)
        except Refusal as error:
            raise Unsupported(str(error)) from None
        return [Tag.TENSOR, dtype, shape, self._buffer(piece)]

    def _array(self, value: Any) -> Node:
        if not _numpy_dtype.fullmatch(value.dtype.str):
            raise Unsupported(f"a numpy array of dtype {value.dtype}; numbers, text and times can be saved")
        try:
            piece = buffers.flat(value)
        except Refusal as error:
            raise Unsupported(str(error)) from None
        return [Tag.ARRAY, value.dtype.str, value.shape, self._buffer(piece)]

    def _buffer(self, piece: Piece) -> int:
        self.buffers.append(piece)
        return len(self.buffers) - 1

    def _library(self, value: Any, kind: type) -> Node:
        """Values of torch and numpy; neither is imported here: without the import there are no such values."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None:
            if kind is torch.Size:
                return [Tag.SIZE, list(value)]
            if kind is torch.dtype:
                return [Tag.DTYPE, str(value).removeprefix("torch.")]
            if kind is torch.device:
                return [Tag.DEVICE, str(value)]
            if kind.__module__ == "torch.return_types" and isinstance(value, tuple):
                return [Tag.NAMED, kind.__name__, self.items(value)]
        if numpy is not None:
            if kind is numpy.ndarray or kind is numpy.memmap:
                return self._numbered(value, Writer._array)
            if isinstance(value, numpy.generic) and _numpy_dtype.fullmatch(value.dtype.str):
                array = numpy.array([value])  # an empty string has no size as a scalar
                return [Tag.SCALAR, array.dtype.str, array.tobytes()]
        raise Unsupported(_advice(value, kind))


def _factory(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if FACTORIES.get(name) is not factory:
        raise Unsupported(f"a defaultdict with {name or 'an object'} as its factory; save `dict(x)`")
    return name


_WRITERS: dict[type, Callable[[Writer, Any], Node]] = {
    list: lambda writer, value: [Tag.LIST, writer.items(value)],
    tuple: lambda writer, value: [Tag.TUPLE, writer.items(value)],
    dict: lambda writer, value: [Tag.DICT, *writer.entries(value)],
    set: lambda writer, value: [Tag.SET, writer.items(value)],
    frozenset: lambda writer, value: [Tag.FROZENSET, writer.items(value)],
    bytearray: lambda _, value: [Tag.BYTEARRAY, bytes(value)],
    OrderedDict: lambda writer, value: [Tag.ORDERED_DICT, *writer.entries(value)],
    Counter: lambda writer, value: [Tag.COUNTER, *writer.entries(value)],
    defaultdict: lambda writer, value: [Tag.DEFAULT_DICT, _factory(value), *writer.entries(value)],
    deque: lambda writer, value: [Tag.DEQUE, value.maxlen, writer.items(value)],
}


def _key(key: object) -> str:
    text = quoted(key) if type(key) in (str, int, float, bool, tuple) else type(key).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def quoted(key: object) -> str:
    """``"x"`` rather than ``'x'``, the way this library spells strings in messages."""
    return '"' + key + '"' if isinstance(key, str) and key.isprintable() and '"' not in key else repr(key)


def _advice(value: Any, kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"its type is the named tuple {name}; save `tuple(x)` or `x._asdict()`"
    for base in (dict, list, tuple, set, frozenset, str, bytes, float, int):
        if isinstance(value, base):
            return f"its type is {name}, a subclass of {base.__name__}; save `{base.__name__}(x)`"
    return f"its type is {name}; save its parts: tensors, arrays, numbers, text, and containers of them can be saved"
