"""Whether a block surely does the same in every step of its request, and only reads.

The turns of such a block can wait: an engine keeps what has passed, goes on, and gives the block several steps at once
(`interleaver.lagging_hub`). Nothing but its speed depends on what is said here, since a block that does something else
in such a turn is noticed, and its trace is run again without; so this need not be certain, but should be right.

It is if the body, next to what comes before and behind, has one loop over all steps that are left, whose statements
only bind names, add to lists and call functions that return something new, one after the other: nothing in it depends
on a condition, is an exception or changes a tensor in place.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import lru_cache

from .block import TracerHandle
from .capture import Captured, Site

_BUILTINS = frozenset("abs bool dict enumerate float int len list max min range reversed sorted sum tuple zip".split())

_METHODS = frozenset(
    """
    append extend
    abs all amax amin any arccos arcsin arctan argmax argmin argsort bfloat16 bincount bool bmm cat ceil chunk clamp
    clone cos cosine_similarity count_nonzero cpu cross cummax cummin cumprod cumsum detach diff div dot einsum entropy
    eq erf exp expand expm1 flatten flip float floor fmod gather ge gelu gt half histc index_select int isfinite isinf
    isnan item kthvalue layer_norm le lerp log log10 log1p log2 log_softmax logsumexp long lt masked_select matmul max
    maximum mean median min minimum mm mode movedim mul mv ne neg nonzero norm normalize numel one_hot outer permute
    pow prod quantile reciprocal relu repeat reshape roll round rsqrt sigmoid sign silu sin size softmax sort split sqrt
    square squeeze stack std sub sum t take take_along_dim tan tanh tile to tolist topk trace transpose tril triu
    trunc unbind unflatten unique unsqueeze var vector_norm view view_as where
    """.split()
)
"""What torch's functions and methods of these names return is new, or a view; nothing is changed in place."""

_EXPRESSIONS = (
    ast.Attribute,
    ast.BinOp,
    ast.Call,
    ast.Compare,
    ast.Constant,
    ast.Dict,
    ast.List,
    ast.ListComp,
    ast.Name,
    ast.Slice,
    ast.Starred,
    ast.Subscript,
    ast.Tuple,
    ast.UnaryOp,
)
_PARTS = (ast.comprehension, ast.expr_context, ast.keyword, ast.operator, ast.unaryop, ast.cmpop)


def is_steady(site: Site, captured: Captured) -> bool:
    """Whether the block at `site` is a steady one."""
    tracers = {name for name, value in captured.by_name().items() if isinstance(value, TracerHandle)}
    tracers -= {*site.stores}
    if site.tracer is not None:
        tracers.add(site.tracer)
    return len(site.tree.items) == site.block.item + 1 and _has_one_loop(site.tree, frozenset(tracers))


@lru_cache(maxsize=256)
def _has_one_loop(tree: ast.With, tracers: frozenset[str]) -> bool:
    """Whether all that a body does in steps is one loop that is steady."""
    loops = [node for node in tree.body if isinstance(node, ast.For) and _over_all_steps(node.iter, tracers)]
    if len(loops) != 1:
        return False
    (loop,) = loops
    simple = isinstance(loop.target, ast.Name) and not loop.orelse and all(map(_simple, loop.body))
    return simple and not _summed_up(loop) & _bound(loop)


def _over_all_steps(node: ast.expr, tracers: Collection[str]) -> bool:
    """``tracer.iter``, ``tracer.iter[2:]`` or ``tracer.all()``."""
    if isinstance(node, ast.Subscript):
        key = node.slice
        if not isinstance(key, ast.Slice) or key.upper is not None or key.step is not None:
            return False
        node = node.value
    elif isinstance(node, ast.Call):
        return _is_attribute(node.func, tracers, "all")
    return _is_attribute(node, tracers, "iter")


def _is_attribute(node: ast.expr, of: Collection[str], name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id in of
    )


def _simple(node: ast.stmt) -> bool:
    if isinstance(node, ast.For):
        return not node.orelse and _names(node.target) and _new(node.iter) and all(map(_simple, node.body))
    if isinstance(node, ast.Assign):
        return all(map(_names, node.targets)) and _new(node.value)
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return isinstance(node.target, ast.Name) and node.value is not None and _new(node.value)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and _new(node.value))


def _names(node: ast.expr) -> bool:
    """Whether only names are assigned to."""
    return all(isinstance(part, ast.Name | ast.Tuple | ast.expr_context) for part in ast.walk(node))


def _new(node: ast.expr) -> bool:
    """Whether an expression changes nothing but lists, and has all its parts evaluated."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and not _plain_call(part.func):
            return False
        if isinstance(part, ast.comprehension) and (part.ifs or part.is_async):
            return False
        if not isinstance(part, (*_EXPRESSIONS, *_PARTS)):
            return False
        if isinstance(part, ast.Compare) and len(part.ops) > 1:
            return False
        if isinstance(part, ast.keyword) and part.arg in (None, "out", "inplace"):
            return False
    return True


def _plain_call(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in _BUILTINS
    return isinstance(function, ast.Attribute) and function.attr in _METHODS


def _summed_up(loop: ast.For) -> set[str]:
    """Names with ``total += ...``, which changes a tensor in place."""
    return {
        node.target.id
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }


def _bound(loop: ast.For) -> set[str]:
    """Names that are assigned otherwise."""
    summed = {id(node.target) for node in ast.walk(loop) if isinstance(node, ast.AugAssign)}
    return {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in summed
    }
