"""Reads `nodes` without trusting them: whatever the bytes say, only the types listed in `nodes` are made."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

from . import buffers
from .nodes import FACTORIES, NUMPY_DTYPE, Node, Tag

if TYPE_CHECKING:
    from collections.abc import Callable

_numpy_dtype = re.compile(NUMPY_DTYPE)


class Reader:
    """Rebuilds the values of one message.

    Every method may raise any `Exception` on a message that no writer wrote; the caller makes one error of
    them.

    Args:
        buffers: elements of tensors and arrays; read-only ones are copied, writable ones are used as they are.
    """

    def __init__(self, buffers: list[memoryview]) -> None:
        self._buffers: list[memoryview | None] = list(buffers)
        self._met: list[Any] = []

    def value(self, node: Node) -> Any:
        """The value of `node`."""
        if type(node) is not list:
            return node
        return _READERS[node[0]](self, *node[1:])

    def _new(self, value: Any) -> Any:
        self._met.append(value)
        return value

    def _later(self, make: Callable[[list[Any]], Any], items: list[Node]) -> Any:
        """An immutable container: it exists only once its items do, but its number comes before theirs."""
        number = len(self._met)
        self._met.append(_Unfinished)
        made = self._met[number] = make(self._values(items))
        return made

    def _values(self, nodes: list[Node]) -> list[Any]:
        value = self.value
        made: list[Any] = []
        for node in nodes:
            if type(node) is not list:
                made.append(node)
            elif node[0] == Tag.ALIKE:
                made += self._alike(*node[1:])
            else:
                made.append(value(node))
        return made

    def _ref(self, number: int) -> Any:
        if number < 0 or self._met[number] is _Unfinished:
            raise ValueError("a reference to a value that does not exist yet")
        return self._met[number]

    def _list(self, items: list[Node]) -> list[Any]:
        made: list[Any] = self._new([])
        made.extend(self._values(items))
        return made

    def _set(self, items: list[Node]) -> set[Any]:
        made: set[Any] = self._new(set())
        made.update(self._values(items))
        return made

    def _deque(self, maxlen: int | None, items: list[Node]) -> deque[Any]:
        made: deque[Any] = self._new(deque(maxlen=maxlen))
        made.extend(self._values(items))
        return made

    def _mapping(self, made: dict[Any, Any], keys: list[Node], values: list[Node]) -> dict[Any, Any]:
        self._new(made)
        found = zip(self._values(keys), self._values(values), strict=True)
        for key, value in found:
            made[key] = value  # noqa: PERF403 - `update` of a Counter adds
        return made

    def _tensor(self, dtype: str, shape: list[int], index: int) -> Any:
        return self._new(buffers.tensor(dtype, tuple(shape), self._take(index)))

    def _alike(self, dtype: str, shape: list[int], index: int) -> list[Any]:
        import torch

        if not math.prod(shape):
            raise ValueError("many tensors without elements")  # a short message must not become many values
        with torch.inference_mode(False):
            made = [*torch.unbind_copy(buffers.tensor(dtype, tuple(shape), self._take(index)))]  # type: ignore[func-returns-value, misc]
        self._met += made
        return made

    def _array(self, dtype: str, shape: list[int], index: int) -> Any:
        import numpy

        kind, data = _dtype(dtype), self._take(index)
        count = math.prod(shape)
        if min(shape, default=0) < 0 or count * kind.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes do not make a {dtype} array of shape {shape}")
        own = bytearray(data) if data.readonly else data
        made = numpy.frombuffer(own, kind) if count else numpy.empty(shape, kind)
        return self._new(made.reshape(shape))

    def _take(self, index: int) -> memoryview:
        """A buffer, which has one user only: a short message must not become many copies of a long buffer."""
        data = self._buffers[index]
        if data is None:
            raise ValueError(f"buffer {index} is used twice")
        self._buffers[index] = None
        return data

    def _scalar(self, dtype: str, data: bytes) -> Any:
        import numpy

        kind = _dtype(dtype)
        if len(data) != kind.itemsize:
            raise ValueError(f"{len(data)} bytes do not make a {dtype}")
        return numpy.frombuffer(data, kind)[0]

    def _size(self, sizes: list[int]) -> Any:
        import torch

        return torch.Size(sizes)

    def _dtype(self, name: str) -> Any:
        import torch

        found = vars(torch).get(name)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"no dtype {name!r}")
        return found

    def _device(self, text: str) -> Any:
        import torch

        return torch.device(text)

    def _named(self, name: str, items: list[Node]) -> Any:
        import torch

        kind = vars(torch.return_types).get(name)
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields")):
            raise ValueError(f"no torch.return_types.{name}")
        return kind(self._values(items))


class _Unfinished:
    """Stands for a tuple or frozenset whose items are being read."""


def _dtype(text: str) -> Any:
    import numpy

    if not _numpy_dtype.fullmatch(text):
        raise ValueError(f"a numpy dtype {text!r}")
    return numpy.dtype(text)


def _factory(name: str | None) -> Callable[[], Any] | None:
    return None if name is None else FACTORIES[name]


_READERS: dict[int, Callable[..., Any]] = {
    Tag.REF: Reader._ref,
    Tag.LIST: Reader._list,
    Tag.TUPLE: lambda reader, items: reader._later(tuple, items),
    Tag.DICT: lambda reader, keys, values: reader._mapping({}, keys, values),
    Tag.SET: Reader._set,
    Tag.FROZENSET: lambda reader, items: reader._later(frozenset, items),
    Tag.INT: lambda _, digits: int(digits, 16),
    Tag.COMPLEX: lambda _, real, imag: complex(real, imag),
    Tag.BYTEARRAY: lambda reader, data: reader._new(bytearray(data)),
    Tag.RANGE: lambda reader, *bounds: range(*map(reader.value, bounds)),
    Tag.SLICE: lambda reader, *bounds: slice(*map(reader.value, bounds)),
    Tag.ORDERED_DICT: lambda reader, keys, values: reader._mapping(OrderedDict(), keys, values),
    Tag.DEFAULT_DICT: lambda reader, name, *rest: reader._mapping(defaultdict(_factory(name)), *rest),
    Tag.COUNTER: lambda reader, keys, values: reader._mapping(Counter(), keys, values),
    Tag.DEQUE: Reader._deque,
    Tag.TENSOR: Reader._tensor,
    Tag.SIZE: Reader._size,
    Tag.DTYPE: Reader._dtype,
    Tag.DEVICE: Reader._device,
    Tag.ARRAY: Reader._array,
    Tag.SCALAR: Reader._scalar,
    Tag.NAMED: Reader._named,
}
