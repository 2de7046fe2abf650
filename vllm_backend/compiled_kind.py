"""What was compiled for the layers of one kind, of a model that vLLM compiles.

vLLM traces a model once and drops all guards (`vllm/compilation/wrapper.py`): nothing but the values of tensors and the
number of rows may change from step to step. What holds for a model holds for its layers, so no guard is asked when one
runs. What may change here and not there is looked at instead: the arguments, their types, shapes and layout.

Layers of one kind share what was compiled. Everything that is a layer's own, also its name, is read from the layer in
each call (`LayerName` in `vllm/utils/torch_utils.py`), and the guards tell whether anything else that was relied on is
the same in another layer. Functions that a layer holds are compared by their code, as guards for them cannot be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._dynamo.guards import CheckFunctionManager

ROWS = 23
"""Rows of the forward in which layers are traced. Layers have no size like this: such a dimension has the rows."""

_OTHER_ROWS = (2, 3, 2**14)
"""Guards must hold for these too: a layer that asks how many rows there are does not do the same for all."""


class _Argument(NamedTuple):
    """An argument as it was traced: a tensor; None in `sizes` stands for the number of rows."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]


class CompiledKind:
    """A layer that is traced and compiled, and then run for all layers that it holds for.

    Args:
        layer: the one that is traced.
        args: of a call of it, on `ROWS` rows.
        kwargs: of the same call.
        options: of the compiler.

    Attributes:
        run: what was compiled; called with the layer and its arguments.

    Raises:
        ValueError: its arguments are not all contiguous tensors, or None, or none has rows; or what it does depends
            on their number.
        Exception: whatever the compiler raises.
    """

    def __init__(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> None:
        values = (*args, *kwargs.values())
        self._names = tuple(kwargs)
        self._arguments = [*map(_argument, values)]
        self._tells = _tells(self._arguments)
        self._rows = 0
        self._expected: list[tuple[torch.dtype, torch.Size] | None] = []
        self._codes: dict[str, object] = {}
        for value, argument in zip(values, self._arguments, strict=True):
            for dimension, size in enumerate(argument.sizes if argument else ()):
                if size is None:
                    torch._dynamo.mark_dynamic(value, dimension)
        with torch._dynamo.config.patch(enable_aot_compile=True):
            compiled: Any = torch.compile(
                type(layer).forward.__get__(layer),
                fullgraph=True,
                dynamic=False,
                backend="inductor",
                options={**options, "guard_filter_fn": self._keep},
            )
            self._traced: Any = compiled.aot_compile((args, kwargs))
        for rows in _OTHER_ROWS:
            others = [*map(partial(_like, rows), values, self._arguments)]
            given = dict(zip(self._names, others[len(args) :], strict=True))
            if not self._traced.guard_check(layer, *others[: len(args)], **given):
                raise ValueError("it does something else for other numbers of rows")
        self.run: Callable[..., Any] = self._traced.fn

    def holds_for(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of another layer differs in nothing that was relied on. Not after `settle`."""
        scope = {"self": layer}
        return (
            self.fits(args, kwargs)
            and bool(self._traced.guard_check(layer, *args, **kwargs))
            and all(_code(eval(name, scope)) is code for name, code in self._codes.items())
        )

    def settle(self) -> None:
        """There are no more layers: what `holds_for` needs is dropped."""
        self._traced = None
        self._codes.clear()

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments of a call are like those that were traced."""
        values = (*args, *kwargs.values()) if kwargs else args
        if len(values) != len(self._arguments) or tuple(kwargs) != self._names:
            return False
        at, dimension = self._tells
        if not isinstance(values[at], torch.Tensor) or values[at].dim() <= dimension:
            return False
        if self._rows != (rows := values[at].shape[dimension]):
            self._expect(rows)
        for value, expected in zip(values, self._expected):  # noqa: B905  # it takes time, and they are as many
            if expected is None or value is None:
                if value is not expected:
                    return False
            elif (
                type(value) is not torch.Tensor
                or value.shape != expected[1]
                or value.dtype is not expected[0]
                or not value.is_contiguous()
            ):
                return False
        return True

    def _expect(self, rows: int) -> None:
        self._rows = rows
        self._expected = [
            (argument.dtype, torch.Size(rows if size is None else size for size in argument.sizes))
            if argument
            else None
            for argument in self._arguments
        ]

    def _keep(self, guards: Sequence[Any]) -> list[bool]:
        """Which guards are kept: those of the layer and its arguments, without functions."""
        kept = []
        for guard in guards:
            of_identity = guard.guard_type in CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
            kept.append(not guard.is_global and not of_identity)
            if of_identity and not guard.is_global:
                self._codes[guard.name] = _code(guard.value)
        return kept


def _argument(value: object) -> _Argument | None:
    if value is None:
        return None
    if type(value) is not torch.Tensor or not value.is_contiguous():
        raise ValueError(f"a layer is given {type(value).__name__}, not a contiguous tensor")
    return _Argument(value.dtype, tuple(None if size == ROWS else size for size in value.shape))


def _like(rows: int, value: Any, argument: _Argument | None) -> object:
    """A tensor of any values in the place of an argument, with another number of rows."""
    if argument is None:
        return None
    with torch.inference_mode(value.is_inference()):
        sizes = [rows if size is None else size for size in argument.sizes]
        return torch.empty(sizes, dtype=argument.dtype, device=value.device)


def _tells(arguments: Sequence[_Argument | None]) -> tuple[int, int]:
    """Which argument tells the number of rows, and in which dimension."""
    for at, argument in enumerate(arguments):
        if argument is not None and None in argument.sizes:
            return at, argument.sizes.index(None)
    raise ValueError("a layer is given no tensor that has a row for each token")


def _code(value: object) -> object:
    """What two functions have in common that do the same; for anything else, itself."""
    function = getattr(value, "__func__", value)
    return getattr(function, "__code__", function)
