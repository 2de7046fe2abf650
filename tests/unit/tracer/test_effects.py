"""What blocks may touch: what they do touch, and little else."""

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

from invivo.tracer import effects
from invivo.tracer.pickling import ValuePickler

OWN = "_"
"""Begins the names of what is not meant for users."""


def of_source(source: str) -> frozenset[str]:
    return effects.of_source(ast.parse(textwrap.dedent(source)))


def source_draws(source: str) -> bool:
    return effects.TORCH in of_source(source)


def of_value(value: object) -> set[str]:
    pickler = ValuePickler(io.BytesIO(), None)
    pickler.dump(value)
    return pickler.uses


def test_every_operator_that_torch_calls_random_is_known() -> None:
    random: set[str] = set()
    for name in {name[6:].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}:
        packet = getattr(torch.ops.aten, name)
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, kind).tags for kind in packet.overloads()):
            random.add(name)
    meant = {name for name in random if any(hasattr(space, name) for space in (torch, torch.Tensor, F))}
    assert not sorted(name for name in meant if not name.startswith(OWN) and effects.TORCH not in effects.of_name(name))
    assert len(meant) > 25


def test_every_function_of_torch_that_calls_such_a_one_is_known() -> None:
    spaces = [torch, torch.functional, F, torch.Tensor, torch.linalg, torch.fft, torch.special]
    functions = {
        (name, function)
        for space in spaces
        for name in dir(space)
        if callable(value := getattr(space, name)) and isinstance(function := inspect.unwrap(value), FunctionType)
    }
    drawing = {name for name, function in functions if _names(function.__code__) & effects._DRAWING}
    assert not sorted(
        name for name in drawing if not name.startswith(OWN) and effects.TORCH not in effects.of_name(name)
    )
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
def test_plain_blocks_touch_nothing(source: str) -> None:
    assert not of_source(source)


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
    assert (effects.TORCH in of_value(value)) == expected


SPACES = (torch, torch.functional, F, torch.Tensor, torch.linalg, torch.fft, torch.special)


def test_every_function_of_torch_that_sets_a_mode_is_known() -> None:
    """By their names: torch's setters, less those of what is not put aside for a block (threads, how things print)."""
    of_the_process = {
        "set_deterministic_debug_mode", "set_float32_matmul_precision", "set_flush_denormal", "set_num_interop_threads",
        "set_num_threads", "set_printoptions", "set_vital", "set_warn_always", "set_",
    }  # fmt: skip
    setters = {name for space in SPACES for name in dir(space) if name.startswith(("set_", "autocast", "clear_"))}
    assert not sorted(name for name in setters - of_the_process if not effects.of_name(name))


MODES = [
    "torch.set_default_dtype(torch.float64)",
    "torch.set_grad_enabled(True)",
    "with torch.device('meta'):\n    x = torch.zeros(3)",
    "with h.device:\n    x = torch.zeros(3)",
    "h.device.__enter__()",
    "@torch.no_grad()\ndef f(x):\n    return x",
    "import contextlib",
    "x = torch.autograd.grad(y, h)",
]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("with tracer.invoke(prompt):\n    model.logits", set()),
        ("with tracer.invoke(prompt), h.device:\n    model.logits", {effects.MODES}),
        ("with tracer.invoke(prompt):\n    with h.device:\n        model.logits", {effects.MODES}),
    ],
)
def test_the_with_of_the_block_itself_is_none(block: str, expected: set[str]) -> None:
    assert effects.of_source(ast.parse(block).body[0]) == expected


@pytest.mark.parametrize("source", MODES)
def test_blocks_that_may_change_a_mode(source: str) -> None:
    assert effects.MODES in of_source(source)


@pytest.mark.parametrize("source", ["print(h)", "import sys", "breakpoint()", "import pprint", "exec(text)"])
def test_blocks_that_may_print(source: str) -> None:
    assert effects.PRINTS in of_source(source)


def entering(h: torch.Tensor) -> torch.Tensor:
    with h.device:
        return torch.zeros(3)


@torch.no_grad()
def decorated(h: torch.Tensor) -> torch.Tensor:
    return h


def talking(h: torch.Tensor) -> None:
    print(h)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (own, set()),
        (entering, {effects.MODES}),
        (decorated, {effects.TORCH, effects.MODES, effects.PRINTS}),
        (torch.no_grad, {effects.TORCH, effects.MODES, effects.PRINTS}),
        (talking, {effects.PRINTS}),
        (print, {effects.PRINTS}),
        (eval, {effects.TORCH, effects.MODES, effects.PRINTS}),
        ([].append, set()),
    ],
    ids=["plain", "with", "decorated", "a mode", "print inside", "print", "eval", "a method of a list"],
)
def test_values_that_may_touch_something(value: object, expected: set[str]) -> None:
    assert of_value(value) == expected
