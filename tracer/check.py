"""Names checked before anything runs.

A block's Envoys are known when it is captured, so a misspelled module or an index out of range is refused at the
`with`, at the line where it stands, and not only when the block gets there. Chains with parts that are known only at
run time (``layers[i]``) are checked as far as they go, with the first child standing for any; code that may never run
(branches, nested functions) is left to the block, which raises the same error at the same line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache

from ..envoy.envoy import Envoy
from ..envoy.errors import UnknownNameError
from .capture import Captured, Site


def check_names(site: Site, captured: Captured) -> None:
    """Resolve every chain of attributes and indices that starts at an Envoy.

    Args:
        site: the block; chains from names that it assigns itself are not followed.
        captured: the variables that it reads.

    Raises:
        UnknownNameError: a name that the tree does not have; it says where.
    """
    values = captured.by_name().items()
    roots = {name: value for name, value in values if isinstance(value, Envoy) and name not in site.stores}
    if not roots:
        return
    for node in _chains(site.tree):
        try:
            _resolve(node, roots)
        except UnknownNameError as error:
            raise UnknownNameError(f"{site.block.filename}:{node.lineno}: {error}") from None


@lru_cache(maxsize=256)
def _chains(tree: ast.AST) -> tuple[ast.Attribute | ast.Subscript, ...]:
    """The attributes and items that are surely looked up, each with all in front of it; kept, since a trace may have
    many invokes of one body."""
    found = [node for node in _certain(tree) if isinstance(node, ast.Attribute | ast.Subscript)]
    inner = {id(node.value) for node in found}
    return tuple(node for node in found if id(node) not in inner)


def _certain(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run whenever the block does (or a loop in it): not branches, `try` bodies or nested functions."""
    yield node
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield from _certain(node.test)
    elif isinstance(node, ast.Match):
        yield from _certain(node.subject)
    elif isinstance(node, ast.BoolOp):
        yield from _certain(node.values[0])
    elif not isinstance(
        node, ast.Try | ast.TryStar | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    ):
        for child in ast.iter_child_nodes(node):
            yield from _certain(child)


def _resolve(node: ast.expr, roots: Mapping[str, Envoy]) -> Envoy | None:
    """The Envoy that an expression names, or None if it is something else or not known yet."""
    if isinstance(node, ast.Name):
        return roots.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _resolve(node.value, roots)
        own = vars(base).get(node.attr) if base is not None else None
        if base is None or hasattr(type(base), node.attr) or (own is not None and not isinstance(own, Envoy)):
            return None
        if isinstance(node.ctx, ast.Store):
            base.check_writable(node.attr)
            return None
        child = getattr(base, node.attr)
        return child if isinstance(child, Envoy) else None
    if isinstance(node, ast.Subscript):
        base = _resolve(node.value, roots)
        if base is None:
            return None
        index = _constant(node.slice)
        if isinstance(index, int | str):
            return base[index]
        if not isinstance(node.slice, ast.Slice) and len(base):
            return base[0]
    return None


def _constant(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
