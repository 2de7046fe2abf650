"""Values on their way to the engine: what a block reads from its caller, as bytes.

The stream is a pickle (a trace is code; who may send one is decided before it gets here), made so that it
stays small and
true: Envoys travel as addresses, tensors as raw buffers beside the pickle, installed functions, classes and
modules by name, and the caller's own by value (`by_value`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..envoy.errors import ForeignError, TransferError
from . import buffers

if TYPE_CHECKING:
    import torch

    from ..envoy.envoy import Envoy
    from .block import TensorBlob
    from .common import Blobs

Scopes = Mapping[str, Mapping[str, object]]
"""Captured values: by scope (``"local"``, ``"global"``), by name."""


@dataclass(frozen=True)
class Encoded:
    """Captured values, ready to be sent.

    Attributes:
        data: the pickle.
        tensors: the buffers that the pickle refers to by index.
        uses: what the values may touch of the process (`Payload.uses`).
        barriers: the barriers that they refer to, each with the number of blocks that meet there.
    """

    data: bytes
    tensors: tuple[TensorBlob, ...]
    uses: frozenset[str]
    barriers: tuple[tuple[str, int], ...] = ()


Key = Callable[[object], "str | None"]
"""The key of an object that several blocks share; None for all others."""


def encode(values: Scopes, owner: Envoy, key: Key | None = None, blobs: Blobs | None = None) -> Encoded:
    """Turns captured values into bytes.

    Args:
        values: ``{"local": {...}, "global": {...}}``.
        owner: the Envoy of the whole model that is traced.
        key: tells the objects that are sent as references; None if there are none.
        blobs: the tensors that other blocks of the trace have captured.

    Raises:
        TransferError: a value cannot be sent; the message names the variable, and the part of it that is to
            blame.
        ForeignError: an Envoy of another model.
    """
    try:
        return _encode({scope: dict(names) for scope, names in values.items()}, owner, key, blobs)
    except Exception as error:
        raise _explained(values, owner, key, error) from None


def _encode(values: object, owner: object, key: Key | None, blobs: Blobs | None = None) -> Encoded:
    from .pickling import SharingPickler, ValuePickler

    file = io.BytesIO()
    pickler = ValuePickler(file, owner, blobs) if key is None else SharingPickler(file, owner, key, blobs)
    pickler.dump(values)
    barriers = tuple(sorted(pickler.barriers.items()))
    return Encoded(file.getvalue(), tuple(pickler.tensors), frozenset(pickler.uses), barriers)


def _explained(values: Scopes, owner: object, key: Key | None, error: Exception) -> Exception:
    """The error to raise for `error`: finds the variable by sending each one alone."""
    from .unsendable import find

    def attempt(value: object) -> Exception | None:
        try:
            _encode(value, owner, key)
        except Exception as raised:
            return raised
        return None

    for names in values.values():
        for name, value in names.items():
            raised = attempt(value)
            if raised is None:
                continue
            path, part, reason = find(value, attempt, raised)
            if isinstance(reason, ForeignError):
                return ForeignError(f"`{name}{path}` cannot be used in this trace: {reason}.")
            return TransferError(
                f"The block reads `{name}`, which cannot be sent to the engine: `{name}{path}` is "
                f"{_article(type(part))}, and {_reason(reason)}. Read what the block needs of it into a variable "
                "before the `with`, or create it in the block."
            )
    return TransferError(f"The variables that the block reads cannot be sent to the engine: {error}")


def _article(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _reason(error: Exception) -> str:
    if isinstance(error, buffers.Refusal):
        return str(error)
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return "it is nested too deeply"
    return f"pickle refuses it ({type(error).__name__}: {error})"


def decode(
    data: bytes,
    tensors: Sequence[TensorBlob],
    *,
    envoy: Callable[[str], object],
    tracer: object,
    device: torch.device | None = None,
    shared: Callable[[str], object] | None = None,
) -> dict[str, dict[str, Any]]:
    """Makes the values again. Runs whatever the sender put into `data`.

    Args:
        data: `Encoded.data`.
        tensors: `Encoded.tensors`.
        envoy: makes the Envoy of an address.
        tracer: what takes the place of the tracer.
        device: where tensors go; they are normal tensors that own their memory, also under an inference mode.
        shared: gives the shared object of a key; None if there are none.

    Raises:
        TransferError: a module or class that is installed at the sender is not installed here, or the
            sender's functions are of another Python version.
    """
    reader = _Reader(data, tensors, envoy, tracer, device, shared)
    values: dict[str, dict[str, Any]] = reader.load()
    return values


class _Reader(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        tensors: Sequence[TensorBlob],
        envoy: Callable[[str], object],
        tracer: object,
        device: torch.device | None,
        shared: Callable[[str], object] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors
        self._envoy = envoy
        self._tracer = tracer
        self._device = device
        self._shared = shared

    def persistent_load(self, key: Any) -> object:
        if self._shared is None:
            raise pickle.UnpicklingError(f"a shared object {key} outside of a trace of several invokes")
        return self._shared(key)

    def find_class(self, module: str, name: str) -> Any:
        if name == "resolve" and module == _PICKLING:
            return self._resolve
        try:
            if name == "import_module" and module == _BY_VALUE:
                return _import_module
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise _missing(f"`{name}` of the module `{module}`", error) from error

    def _resolve(self, kind: str, key: Any) -> object:
        if kind == "tensor":
            blob = self._tensors[key]
            return buffers.tensor(blob.dtype, tuple(blob.shape), blob.data, self._device)
        return self._envoy(key) if kind == "envoy" else self._tracer


_PICKLING = __name__.replace("codec", "pickling")
_BY_VALUE = __name__.replace("codec", "by_value")


def _import_module(name: str) -> object:
    from .by_value import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise _missing(f"the module `{name}`", error) from error


def _missing(what: str, error: Exception) -> TransferError:
    return TransferError(
        f"The block uses {what}, which the engine's Python does not have ({error}). Install it where the engine runs."
    )
