"""Which blocks may draw from torch: all that do, and few of those that do not."""

from __future__ import annotations

import ast
import inspect
import io
import operator
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from invivo.tracer import draws
from invivo.tracer.pickling import ValuePickler

OWN = "_"
"""Begins the names of what is not meant for users."""


def source_draws(source: str) -> bool:
    return draws.in_source(ast.parse(textwrap.dedent(source)))


def value_draws(value: object) -> bool:
    pickler = ValuePickler(io.BytesIO(), None)
    pickler.dump(value)
    return draws.TORCH in pickler.uses


def test_every_operator_that_torch_calls_random_is_known() -> None:
    random: set[str] = set()
    for name in {name[6:].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}:
        packet = getattr(torch.ops.aten, name)
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, kind).tags for kind in packet.overloads()):
            random.add(name)
    meant = {name for name in random if any(hasattr(space, name) for space in (torch, torch.Tensor, F))}
    assert not sorted(name for name in meant if not name.startswith(OWN) and not draws.named(name))
    assert len(meant) > 25


def test_every_function_of_torch_that_calls_such_a_one_is_known() -> None:
    spaces = [torch, torch.functional, F, torch.Tensor, torch.linalg, torch.fft, torch.special]
    functions = {
        (name, function)
        for space in spaces
        for name in dir(space)
        if callable(value := getattr(space, name)) and isinstance(function := inspect.unwrap(value), FunctionType)
    }
    drawing = {name for name, function in functions if _names(function.__code__) & draws._DRAWING}
    assert not sorted(name for name in drawing if not name.startswith(OWN) and not draws.named(name))
    assert "gumbel_softmax" in drawing


def _names(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *(name for inner in nested for name in _names(inner))}


@pytest.mark.parametrize(
    "source",
    [
        "h = model.model.layers[5].output[0].save()",
        "model.model.layers[8].output[0][-1] += v",
        "p = torch.softmax(model.logits.float(), -1).topk(5)",
        "for step in tracer.iter[:]:\n    hs.append(F.cosine_similarity(model.layers[1].output[0], v))",
        "import math\nx = math.sqrt(2)",
    ],
)
def test_plain_blocks_do_not_draw(source: str) -> None:
    assert not source_draws(source)


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.randn(3)",
        "model.model.layers[0].output[0].normal_()",
        "x = torch.multinomial(p, 1)",
        "torch.manual_seed(0)",
        "layer = torch.nn.Linear(3, 3)",
        "x = F.dropout(h)",
        "x = getattr(torch, name)(3)",
        "import einops",
        "from torch import rand",
        "from torch.nn import functional",
        "g = torch.Generator()",
        "torch.ops.aten.bernoulli(p)",
    ],
)
def test_blocks_that_may_draw(source: str) -> None:
    assert source_draws(source)


def own(h: torch.Tensor) -> torch.Tensor:
    return torch.relu(h) + h.mean()


def noisy(h: torch.Tensor) -> torch.Tensor:
    return h + torch.randn_like(h)


def outer() -> Callable[[torch.Tensor], torch.Tensor]:
    def inner(h: torch.Tensor) -> torch.Tensor:
        return h.uniform_()

    return inner


def importing(h: torch.Tensor) -> Any:
    import json

    return json.dumps(h.tolist())


VALUES: dict[str, tuple[object, bool]] = {
    "a tensor": (torch.ones(3), False),
    "containers": ({"a": [1, 2.0, "x"], "b": (torch.ones(2), None)}, False),
    "torch": (torch, False),
    "torch.nn.functional": (F, False),
    "torch.nn": (torch.nn, True),
    "a function of torch": (torch.softmax, False),
    "a function of torch that draws": (torch.randn, True),
    "a function": (own, False),
    "a function that draws": (noisy, True),
    "a nested function that draws": (outer, True),
    "a function that imports": (importing, True),
    "what calls a method by name": (operator.methodcaller("normal_"), True),
    "a module with weights": (torch.nn.Linear(2, 2), True),
    "something installed": (pytest.approx, True),
}


@pytest.mark.parametrize(("value", "expected"), VALUES.values(), ids=VALUES)
def test_values_that_may_draw(value: object, expected: bool) -> None:
    assert value_draws(value) == expected
