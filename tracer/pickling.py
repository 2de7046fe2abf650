"""The pickler of captured values: cloudpickle, except for what invivo sends in its own way."""

from __future__ import annotations

import pickle
import sys
import threading
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from ..envoy.envoy import Envoy
from ..envoy.errors import ForeignError
from . import buffers, by_value, effects
from .barrier import Barrier
from .block import SpentTracer, TensorBlob, TracerHandle
from .buffers import Refusal
from .common import Blobs
from .unsendable import refuse

if TYPE_CHECKING:
    import io
    from collections.abc import Callable

_registry = threading.RLock()
"""Held while a pickler works: which modules cloudpickle takes by value is a global setting of cloudpickle."""


def resolve(*_: str | int) -> object:
    """Stands in the pickle, with a kind and a key, for an Envoy, a tensor or the tracer of the reader."""
    raise pickle.UnpicklingError("captured values are read by `codec.decode`")


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the values of one block.

    Attributes:
        tensors: the tensors met so far; `resolve` refers to them by index.
        uses: what of the process may be touched by what was met so far (`effects`).
        barriers: the barriers met so far, each with the number of blocks that meet there.
    """

    def __init__(self, file: io.BytesIO, owner: object, blobs: Blobs | None = None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._blobs = blobs or Blobs()
        self.tensors: list[TensorBlob] = []
        self.uses: set[str] = set()
        self.barriers: dict[str, int] = {}
        self._owner = owner
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._registered: list[ModuleType] = []

    def dump(self, obj: object) -> None:
        """Pickles `obj` into the file."""
        with _registry:
            try:
                super().dump(obj)
            finally:
                for module in self._registered:
                    cloudpickle.unregister_pickle_by_value(module)
                self._registered.clear()

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for every object but numbers, text and plain containers."""
        if isinstance(obj, FunctionType):
            if obj is resolve:
                return NotImplemented
            if not by_value.by_name(obj):
                return by_value.function_parts(obj, self._namespaces)
            self._note(obj.__module__, obj.__name__)
            return NotImplemented
        if isinstance(obj, CodeType):
            self.uses |= effects.of_code(obj)
            return by_value.code_parts(obj)
        if isinstance(obj, ModuleType):
            return self._module(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if buffers.is_tensor(obj):
            self.tensors.append(self._blobs.of(obj))
            return resolve, ("tensor", len(self.tensors) - 1)
        if isinstance(obj, Envoy):
            self._check(obj)
            return resolve, ("envoy", obj.address)
        if isinstance(obj, TracerHandle):
            if obj.spent:
                return SpentTracer, (obj.described,)
            return resolve, ("tracer", 0)
        if isinstance(obj, Barrier):
            self.barriers[obj.key] = obj.count
        refuse(obj)
        if isinstance(obj, BuiltinFunctionType):
            self._note(obj.__module__ or "builtins", obj.__name__)
        return super().reducer_override(obj)

    def _check(self, value: object) -> None:
        if isinstance(value, Envoy) and value.root is not self._owner:
            name = value.address or "model"
            raise ForeignError(f"the Envoy `{name}` belongs to another model than the one that is traced")

    def _module(self, module: ModuleType) -> Any:
        if by_value.is_installed(module):
            self._note(module.__name__, "", entire=True)
            return by_value.import_module, (module.__name__,)
        return by_value.module_parts(module, self._refusal)

    def _refusal(self, value: object) -> str | None:
        try:
            refuse(value)
            self._check(value)
        except (Refusal, ForeignError) as error:
            return str(error)
        return None

    def _class(self, kind: type) -> Any:
        if by_value.by_name(kind):
            self._note(kind.__module__, kind.__name__)
            return super().reducer_override(kind)
        module = sys.modules.get(kind.__module__ or "")
        if module is not None and module.__name__ in sys.modules and not by_value.is_installed(module):
            self._register(module)
        parts = super().reducer_override(kind)
        if isinstance(parts, tuple) and len(parts) == 6:
            return by_value.class_parts(kind, parts)
        return parts

    def _register(self, module: ModuleType) -> None:
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)

    def _note(self, module: str, name: str, *, entire: bool = False) -> None:
        """Note what a reference to `name` in an installed module, or to an entire one, may touch."""
        if (module, name) != ("builtins", "getattr"):  # pickle itself refers to it for the methods of objects
            self.uses |= effects.of_name(name) | effects.of_module(module)
        if module == "random":
            self.uses.add("random")
        elif module.startswith("numpy.random") or (module == "numpy" and entire):
            self.uses.add("numpy")


class SharingPickler(ValuePickler):
    """A `ValuePickler` that leaves out shared containers, and refers to them by key.

    Args:
        key: the key of an object, or None if it is not shared.
    """

    def __init__(
        self, file: io.BytesIO, owner: object, key: Callable[[object], str | None], blobs: Blobs | None = None
    ) -> None:
        super().__init__(file, owner, blobs)
        self._key = key

    def persistent_id(self, obj: object) -> str | None:
        """Called by pickle for every object."""
        return self._key(obj)
