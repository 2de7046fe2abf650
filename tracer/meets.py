"""Whether a block meets modules, or only what comes after the forward: logits and samples.

An engine that prepares its steps early can launch the forward of a step before a block of the second kind has its turn
in it. So that must be certain: the model appears in the source of the block as `model.logits` and `model.samples`
alone, and in nothing else that the block captured.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType

from ..envoy.address import LOGITS, SAMPLES
from ..envoy.envoy import RootEnvoy
from . import buffers, by_value
from .block import TracerHandle
from .capture import Captured, Site

_ROUNDABOUT = frozenset(("eval", "exec", "globals", "locals", "vars", "__import__"))
"""Functions that get at a variable which the source does not name."""

_PLAIN = (bool, int, float, complex, str, bytes, EllipsisType, type(None))
_HOLDING = (list, tuple, set, frozenset, dict)
_MOST = 1000
"""Values that are looked at in a block; with more of them, it may meet modules."""


def no_module(site: Site, captured: Captured) -> bool:
    """Whether a block surely meets no module."""
    values = captured.by_name()
    models = {name for name, value in values.items() if isinstance(value, RootEnvoy)}
    left = _MOST
    for value in _all(value for name, value in values.items() if name not in models):
        left -= 1
        if left < 0 or not _plain(value):
            return False
    return _only_after_the_forward(site.tree, site.block.item, frozenset(models))


@lru_cache(maxsize=256)
def _only_after_the_forward(tree: ast.With, item: int, models: frozenset[str]) -> bool:
    """Whether a body names the models for their logits and samples alone."""
    parts = [*tree.items[item + 1 :], *tree.body]
    nodes = [node for part in parts for node in ast.walk(part)]
    met = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in (LOGITS, SAMPLES)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return all(node.id not in _ROUNDABOUT and (node.id not in models or id(node) in met) for node in names)


def _all(values: Iterator[object]) -> Iterator[object]:
    """Values, and those in plain containers."""
    todo, seen = [*values], set[int]()
    while todo:
        value = todo.pop()
        yield value
        if type(value) in _HOLDING and id(value) not in seen:
            seen.add(id(value))
            todo += [*value, *value.values()] if isinstance(value, dict) else [*value]  # type: ignore[misc]


def _plain(value: object) -> bool:
    """Whether a value, apart from what it holds, has nothing of a model in it."""
    if type(value) in _PLAIN or type(value) in _HOLDING or buffers.is_tensor(value):
        return True
    if isinstance(value, ModuleType):
        return by_value.is_installed(value)
    if isinstance(value, FunctionType | type):
        return by_value.by_name(value)
    return isinstance(value, BuiltinFunctionType | TracerHandle)
