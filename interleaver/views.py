"""The parts of a port that a block sees: `.input` inside of `.inputs`, one row of samples, and so on."""

from __future__ import annotations

import operator
from typing import TypeAlias, cast

import torch

from ..envoy.errors import WriteError

Part: TypeAlias = str
Inputs: TypeAlias = "tuple[tuple[object, ...], dict[str, object]]"

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


def view(value: object, part: Part) -> object:
    """What reading `part` gives: the port's value, or a piece of it."""
    if part != "input":
        return value
    args, kwargs = cast(Inputs, value)
    place = _main_argument(args, kwargs)
    if place is None:
        raise WriteError("the module is called without arguments, so it has no `.input`.")
    return args[place] if isinstance(place, int) else kwargs[place]


def with_part(value: object, part: Part, given: object) -> object:
    """The port's value with `part` replaced by `given`."""
    if part == "samples":
        return _as_samples(cast(torch.Tensor, value), given)
    if part != "input":
        return given
    args, kwargs = cast(Inputs, value)
    place = _main_argument(args, kwargs)
    if isinstance(place, int):
        return (*args[:place], given, *args[place + 1 :]), kwargs
    if place is None:
        raise WriteError("the module is called without arguments, so it has no `.input`.")
    return args, {**kwargs, place: given}


def _main_argument(args: tuple[object, ...], kwargs: dict[str, object]) -> int | str | None:
    """Place of the first floating-point tensor, else of the first argument."""
    places: list[int | str] = [*range(len(args)), *kwargs]
    for place in places:
        argument = args[place] if isinstance(place, int) else kwargs[place]
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            return place
    return places[0] if places else None


def _as_samples(current: torch.Tensor, given: object) -> torch.Tensor:
    """A whole number, or an integer tensor of one element, as a sampled token id."""
    number = None if isinstance(given, torch.Tensor | bool) else given
    if isinstance(given, torch.Tensor) and given.numel() == 1 and given.dtype in _INTEGERS:
        number = given.item()
    try:
        token = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        token = None
    if token is None or abs(token) > torch.iinfo(current.dtype).max:
        raise WriteError(
            "`model.samples` takes the id of a token, a whole number or an integer tensor of one element, and got "
            f"{given!r}. The id of a text is `model.tokenizer(text)['input_ids'][0]`."
        )
    return torch.full_like(current, token)
