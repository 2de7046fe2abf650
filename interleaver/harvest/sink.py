"""A harvest's side in the process of the model: the block that reads the ports, and what it gives the rows to.

Every prompt is a trace, and its block is one line that calls `take`. Writers are known by the name of the run, so that
what travels with a prompt is its number and its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import torch

from ...envoy import active
from ...envoy.address import SAMPLES, port_at
from ...envoy.errors import MisuseError
from ..values import tensors_of
from . import layout
from .plan import Plan
from .ports import Choice
from .writer import Writer

_writers: dict[str, Writer] = {}
_choices = msgspec.msgpack.Decoder(tuple[Choice, ...])
_samples = port_at("", SAMPLES)


def begin(plan: bytes) -> str:
    """Open the writer of a harvest; says why it cannot be, or nothing. (Calls into an engine lose exceptions.)"""
    decoded = msgspec.msgpack.decode(plan, type=Plan)
    try:
        _writers[decoded.run] = Writer(decoded)
    except (MisuseError, OSError) as error:
        return str(error)
    return ""


def end(run: str) -> str:
    """Write what is left, and close the writer; says what could not be written, or nothing."""
    writer = _writers.pop(run, None)
    try:
        if writer is not None:
            writer.close()
    except MisuseError as error:
        return str(error)
    return ""


def look(choices: bytes, rows: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """In a block: name, dtype and row shape of the tensors that the choices give for a prompt of so many tokens.

    Raises:
        MisuseError: a port that holds no tensors, or others than one row per token.
    """
    found = []
    for choice in _choices.decode(choices):
        parts = list(_read(choice, rows))
        if not parts:
            raise MisuseError(f"`{choice.name}` holds no tensor.")
        for name, tensor in parts:
            if not layout.storable(tensor.dtype):
                raise MisuseError(f"`{name}` is of {tensor.dtype}, which safetensors cannot store.")
            found.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])))
    return found


def take(run: str, number: int, prompt: bytes) -> None:
    """In a block: give the writer the rows of one prompt, when all of them are there.

    Args:
        run: of the harvest.
        number: of the prompt.
        prompt: its tokens, as 32-bit numbers.
    """
    writer = _writers.get(run)
    if writer is None:
        raise MisuseError("the harvest that this prompt belongs to has ended.")
    session, plan = active.session("a harvest"), writer.plan
    given = np.frombuffer(prompt, np.int32)
    pieces: list[list[torch.Tensor]] = [[] for _ in plan.columns]
    generated: list[int] = []
    step = 0
    while step == 0 or session.advance(step):
        rows = len(given) if step == 0 else 1
        parts = [(tensor, choice.of_step or step > 0) for choice in plan.choices for _, tensor in _read(choice, rows)]
        for column, kept, (tensor, whole) in zip(plan.columns, pieces, parts, strict=True):
            kept.append(_kept(tensor, None if whole else plan.rows, column.torch_dtype))
        if step == plan.generate:
            break
        generated.append(int(session.read(_samples, "samples")))  # type: ignore[call-overload]
        step += 1
    forwards = len(pieces[0]) - 1
    chosen = np.arange(len(given))[plan.rows]
    tokens = np.concatenate([given[chosen], np.array(generated[:forwards], np.int32)])
    places = np.concatenate([chosen, np.arange(len(given), len(given) + forwards)]).astype(np.int32)
    writer.add(number, prompt, torch.from_numpy(tokens), torch.from_numpy(places), pieces)


def _read(choice: Choice, rows: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a port with their names, one row per token each."""
    value = active.session(choice.name).read(port_at(choice.address, choice.kind), choice.part)
    for key in choice.path:
        try:
            value = value[key]  # type: ignore[index]
        except (LookupError, TypeError) as error:
            raise MisuseError(f"`{choice.name}`: what the port holds has no part [{key!r}] ({error}).") from error
    rows = 1 if choice.of_step else rows
    if choice.summed:
        tensors = tensors_of(value)
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = [list(tensor.shape) for tensor in tensors]
            raise MisuseError(f"`{choice.name}`: the parts have different shapes, {shapes}.")
        value = sum(tensors[1:], tensors[0]) if tensors else None
    for name, tensor in _named(choice.name, value):
        yield name, _by_row(tensor, rows, name)


def _named(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a structure, with their places in it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _named(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _named(f"{name}[{key!r}]", item)


def _by_row(tensor: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    """The tensor with its rows first; modules of transformers have a batch dimension of one before them."""
    shape = tensor.shape
    if len(shape) > 2 and shape[0] == 1 and shape[1] == rows:
        return tensor[0]
    if not shape or shape[0] != rows:
        raise MisuseError(
            f"`{name}` has the shape {list(shape)} for {rows} tokens: only ports with one row per token can be "
            "harvested."
        )
    return tensor


def _kept(tensor: torch.Tensor, rows: slice | None, dtype: torch.dtype) -> torch.Tensor:
    """The rows to be stored, which do not keep the others in memory."""
    if rows is None or rows == slice(None):
        return tensor.to(dtype)
    return tensor[rows].to(dtype, copy=True)
