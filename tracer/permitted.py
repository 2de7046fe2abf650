"""What a block must not do, found in its syntax tree before anything is sent.

A block runs elsewhere and as a whole: it cannot hand control back to the function around it (`return`, `yield`,
`await`, a `break` of an outer loop), and there is no event loop where it runs.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..envoy.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
Kind: TypeAlias = Literal["trace", "outer", "invoke"]
"""A trace of one prompt; the trace around several invokes; one of these."""

_INVOKES: dict[Kind, tuple[str, str]] = {
    "trace": (
        "`tracer.invoke` in a trace that has a prompt",
        "leave the prompt out of `model.trace(...)`, and give it to a `tracer.invoke(prompt)` of its own.",
    ),
    "invoke": ("an invoke inside of another one", "end this `with`, and begin the other one after it."),
}


def check_permitted(tree: ast.With, item: int, filename: str, kind: Kind = "trace") -> None:
    """Refuses what cannot be captured.

    Args:
        tree: the `with`.
        kind: what it is; there are invokes in an outer one only.
        item: index of the item that is the trace; the later ones belong to the block.
        filename: for the message.

    Raises:
        CaptureError: for the first statement or expression that a block must not have, naming its line.
    """
    target = tree.items[item].optional_vars
    if isinstance(target, ast.Tuple | ast.List):
        raise CaptureError(_message(filename, target, "`as` with several names", "name the tracer once."))
    for later in tree.items[item + 1 :]:
        expression = later.context_expr
        if _is_trace(expression):
            what = "a second trace in the same `with`"
            raise CaptureError(_message(filename, expression, what, "write two `with` statements."))
    for node, in_loop in _own([*tree.items[item + 1 :], *tree.body], in_loop=False):
        found = _refused(node, in_loop, kind)
        if found is not None:
            raise CaptureError(_message(filename, node, *found))


def _refused(node: ast.AST, in_loop: bool, kind: Kind) -> tuple[str, str] | None:
    """What is wrong with a node and what to do instead; None if it is fine."""
    match node:
        case ast.Return():
            return "`return`", "save the value (`x = x.save()`) and return it after the `with`."
        case ast.Yield() | ast.YieldFrom():
            return "`yield`", "save the values and yield them after the `with`."
        case ast.Await():
            return "`await`", "await before the `with` and use the result in it."
        case ast.With(items=items) if any(is_invoke(item.context_expr) for item in items):
            return _INVOKES.get(kind)
        case ast.With(items=items) if any(_is_trace(item.context_expr) for item in items):
            return "a trace inside of another one", "end this `with`, and begin the other one after it."
        case ast.AsyncWith():
            return "`async with`", "enter it around the trace."
        case ast.AsyncFor():
            return "`async for`", "collect its items before the `with`."
        case ast.comprehension(is_async=1):
            return "an asynchronous comprehension", "collect its items before the `with`."
        case ast.Break() if not in_loop:
            return "`break` of a loop outside of it", "save what decides it and `break` after the `with`."
        case ast.Continue() if not in_loop:
            return "`continue` of a loop outside of it", "save what decides it and `continue` after the `with`."
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return "`import *`", "name what you import."
        case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
            return "`super()` without arguments", "write `super(TheClass, self)`."
    return None


def _own(nodes: Iterable[ast.AST], in_loop: bool) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes that run in the block's own scope, each with whether a loop of the block is around it."""
    for node in nodes:
        match node:
            case ast.Lambda():
                yield from _own(_defaults(node.args), in_loop)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _own([*node.decorator_list, *_defaults(node.args)], in_loop)
            case ast.ClassDef():
                yield from _own([*node.decorator_list, *node.bases, *node.keywords], in_loop)
            case ast.For() | ast.AsyncFor() | ast.While():
                yield node, in_loop
                yield from _own([node.test] if isinstance(node, ast.While) else [node.target, node.iter], in_loop)
                yield from _own(node.body, True)
                yield from _own(node.orelse, in_loop)
            case _:
                yield node, in_loop
                yield from _own(ast.iter_child_nodes(node), in_loop)


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]


def _is_trace(node: ast.expr) -> bool:
    return is_invoke(node) or _calls(node, "trace")


def is_invoke(node: ast.AST) -> bool:
    """Whether an expression of a `with` begins an invoke: ``X.invoke(...)``."""
    return _calls(node, "invoke")


def _calls(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _message(filename: str, node: ast.AST, what: str, instead: str) -> str:
    if isinstance(node, ast.comprehension):
        node = node.target
    return (
        f"{filename}:{getattr(node, 'lineno', '?')}: {what} in a captured block.\n"
        f"The body of the `with` runs next to the model, not here. Instead: {instead}"
    )
