"""A harvest's side in the process of the model: the block that reads the ports, and what it gives the rows to.

Every prompt is a trace, and its block is one line that calls `take`. Writers are known by the name of the run, so that
what travels with a prompt is its number and its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...envoy import active
from ...envoy.address import SAMPLES, port_at
from ...envoy.errors import MisuseError
from ..structure import tensors_of
from . import layout
from .plan import Plan
from .ports import Choice
from .writer import Writer

Tokens: TypeAlias = "npt.NDArray[Any]"

_writers: dict[str, Writer | _Reader] = {}
_choices = msgspec.msgpack.Decoder(tuple[Choice, ...])
_samples = port_at("", SAMPLES)


class _Reader:
    """Stands for the writer where another process writes what this one only reads with it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @contextmanager
    def place(self, rows: int) -> Iterator[_Reader]:
        """See `Writer`."""
        yield self

    def put(self, *given: object) -> None:
        """See `Place`."""

    fill = put

    def close(self) -> None:
        """See `Writer`."""


def begin(plan: bytes, *, home: bool = True) -> str:
    """Open the writer of a harvest; says why it cannot be, or nothing. (Calls into an engine lose exceptions.)

    Args:
        plan: the encoded plan.
        home: this process writes; of several that run the same blocks only one does.
    """
    decoded = msgspec.msgpack.decode(plan, type=Plan)
    if not home:
        _writers[decoded.run] = _Reader(decoded)
        return ""
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
    given = np.frombuffer(prompt, np.int32)
    chosen = np.arange(len(given))[writer.plan.rows]
    if writer.plan.generate:
        _take_steps(writer, number, prompt, given, chosen)
        return
    plan = writer.plan
    with writer.place(len(chosen)) as place:
        for at, (tensor, rows) in enumerate(_ports(plan, len(given), plan.rows)):
            place.put(at, tensor[rows])
        place.fill(number, prompt, torch.from_numpy(given[chosen]), torch.from_numpy(chosen))


def _take_steps(writer: Writer | _Reader, number: int, prompt: bytes, given: Tokens, chosen: Tokens) -> None:
    """As `take`, with the rows of generated tokens: how many there will be is known at the end."""
    session, plan = active.session("a harvest"), writer.plan
    pieces: list[list[torch.Tensor]] = [[] for _ in plan.columns]
    generated: list[int] = []
    for step in range(plan.generate + 1):
        if not session.advance(step):
            break
        parts = _ports(plan, *((1, slice(None)) if step else (len(given), plan.rows)))
        for column, kept, (tensor, rows) in zip(plan.columns, pieces, parts, strict=True):
            kept.append(tensor[rows].to(column.torch_dtype, copy=rows != slice(None)))
        if step < plan.generate:
            generated.append(int(session.read(_samples, "samples")))  # type: ignore[call-overload]
    forwards = len(pieces[0]) - 1
    tokens = np.concatenate([given[chosen], np.array(generated[:forwards], np.int32)])
    positions = np.concatenate([chosen, np.arange(len(given), len(given) + forwards)])
    with writer.place(len(tokens)) as place:
        for at, kept in enumerate(pieces):
            place.put(at, torch.cat(kept))
        place.fill(number, prompt, torch.from_numpy(tokens), torch.from_numpy(positions))


def _ports(plan: Plan, rows: int, chosen: slice) -> Iterator[tuple[torch.Tensor, slice]]:
    """What the columns of a step are, with the rows that are kept of it."""
    for choice in plan.choices:
        for _, tensor in _read(choice, rows):
            yield tensor, slice(None) if choice.of_step else chosen


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
