"""Sampling arguments of a trace, as vLLM's `SamplingParams`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, get_args

from msgspec import structs
from vllm import SamplingParams

from ..envoy.address import suggestion
from ..envoy.errors import SamplingError, UnsupportedError
from .compat import MsgpackDecoder, MsgpackEncoder, RequestOutputKind, VLLMValidationError
from .settings import KEY

_SCALARS = frozenset({bool, int, float, str, type(None), RequestOutputKind})
"""Types of arguments that cannot change, and are equal only to themselves where the type is the same."""


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Build the sampling parameters of a trace; the caller's own objects are never changed.

    Args:
        given: keywords of `SamplingParams`, or ``sampling_params`` with an object to start from.

    Raises:
        SamplingError: an unknown argument, or a value that vLLM refuses.
        UnsupportedError: an argument that traces cannot go with.
    """
    params = plain_params(given)
    if params.stop:
        raise UnsupportedError(
            "`stop`: vLLM finds stop strings outside of the engine, when that has begun further steps; a block would "
            "see steps that the output does not have. Use `stop_token_ids`, or `tracer.stop()` in the block."
        )
    return params


def plain_params(given: dict[str, Any]) -> SamplingParams:
    """Build the sampling parameters of a request without a block; see `sampling_params`."""
    base = given.pop("sampling_params", None)
    if base is not None:
        if not isinstance(base, SamplingParams):
            raise SamplingError(f"`sampling_params` takes a vllm.SamplingParams, and got {type(base).__name__}.")
        if given:
            names = ", ".join(f"`{name}`" for name in given)
            raise SamplingError(f"give {names} inside of `sampling_params`, or all as keywords; not both.")
        params = base.clone()
    else:
        if all(type(value) in _SCALARS for value in given.values()):
            _check_scalars(**given)
            return _made(given)
        params = _made(given)
    _check_types(params)
    if KEY in (params.extra_args or {}):
        raise SamplingError(f"`extra_args` must not have the key {KEY!r}: it carries the block.")
    return params


def _made(given: dict[str, Any]) -> SamplingParams:
    for name in given:
        if name not in _known():
            raise SamplingError(f"unknown sampling argument `{name}`.{suggestion(name, _known())}")
    with refusals(TypeError, ValueError):
        return SamplingParams(**given)


@lru_cache(maxsize=64, typed=True)
def _check_scalars(**given: Any) -> None:
    """As `_check_types`, once for the same arguments: the prompts of a trace usually have them in common."""
    _check_types(_made(given))


def _check_types(params: SamplingParams) -> None:
    """Refuse what the engine could not read: vLLM checks few types, and the thread that reads there would end."""
    if _arrives(params, SamplingParams) and not isinstance(params.structured_outputs, dict):
        return
    for field in structs.fields(SamplingParams):
        value = getattr(params, field.name)
        if not _arrives(value, field.type) or (field.name == "structured_outputs" and isinstance(value, dict)):
            due = getattr(field.type, "__name__", field.type) if not get_args(field.type) else field.type
            raise SamplingError(
                f"`{field.name}={value!r}` cannot be sent to the engine: vLLM takes {due}, and this is "
                f"{type(value).__name__} or has another type in it."
            )
    raise SamplingError(f"vLLM's engine could not read these sampling arguments: {params!r}.")


def _arrives(value: object, kind: Any) -> bool:
    """Whether vLLM's messages bring a value to the engine."""
    try:
        MsgpackDecoder(kind).decode(MsgpackEncoder().encode(value))
    except Exception:  # also those of SamplingParams, which is made anew there
        return False
    return True


@contextmanager
def refusals(*others: type[Exception]) -> Iterator[None]:
    """Turn vLLM's refusal of a request into a `SamplingError`.

    Args:
        others: exceptions that mean the same.
    """
    try:
        yield
    except (VLLMValidationError, *others) as error:
        raise SamplingError(f"vLLM refuses these sampling arguments: {error}") from error


@cache
def _known() -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(SamplingParams).parameters if not name.startswith("_"))
