"""Whether the source of a body is that of the code that runs, or the file was edited since it was imported.

The source is compiled again, and the instructions of the body are compared with those that run: what they do, with
which constants and names, and where in the file. All that could make the two differ without an edit is left out: jumps,
`assert` statements (pytest rewrites them), modules whose importer may rewrite them, and code that was not imported.
"""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import os
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import TypeAlias

_Place: TypeAlias = "tuple[int, int]"  # line and column
_Fact: TypeAlias = "tuple[object, ...]"

_STARTED = time.time()
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag
_LEFT_OUT = frozenset({*dis.hasjrel, *dis.hasjabs, *(dis.opmap[name] for name in ("EXTENDED_ARG", "NOP", "PUSH_NULL"))})


def edited_since_start(filename: str) -> bool:
    """Whether the file was written after this process began to use invivo."""
    try:
        return os.stat(filename).st_mtime > _STARTED
    except OSError:
        return False


def same_body(lines: tuple[str, ...], tree: ast.With, item: int, code: CodeType, loader: object) -> bool:
    """Whether the body is what `code` runs, as far as that can be told.

    Args:
        lines: the source of the file.
        tree: the `with` in it, at the place where `code` has one.
        item: index of the item that is entered; all behind it is the body.
        code: the running code object.
        loader: what imported the module of it.
    """
    if type(loader) is not SourceFileLoader and type(loader).__name__ != "AssertionRewritingHook":
        return True
    compiled = _compile(lines, code.co_filename, code.co_flags & _FUTURE)
    if compiled is None:
        return True
    entered = tree.items[item].context_expr
    start = entered.end_lineno or entered.lineno, entered.end_col_offset or 0
    asserts = [_span(node) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    spans = (start, _span(tree)[1]), asserts
    return set(_facts(code, *spans)) == set(_facts(compiled, *spans))


@functools.lru_cache(maxsize=8)
def _compile(lines: tuple[str, ...], filename: str, future: int) -> CodeType | None:
    try:
        code: CodeType = compile("".join(lines), filename, "exec", future, dont_inherit=True)
    except (SyntaxError, ValueError):  # it parses, but has a `break` without a loop
        return None
    return code


def _span(node: ast.stmt) -> tuple[_Place, _Place]:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)


def _facts(code: CodeType, body: tuple[_Place, _Place], asserts: list[tuple[_Place, _Place]]) -> Iterator[_Fact]:
    """The instructions of the body, in this code object and in those inside of it."""
    (first, _), (last, _) = body
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _facts(value, body, asserts)
    if not any(line is not None and first <= line <= last for _, _, line in code.co_lines()):
        return
    for instruction in dis.get_instructions(code):
        position = instruction.positions
        if instruction.opcode in _LEFT_OUT or position is None or position.lineno is None:
            continue
        if position.col_offset is None:
            inside = first < position.lineno <= last and not any(
                begin[0] <= position.lineno <= end[0] for begin, end in asserts
            )
        else:
            place = position.lineno, position.col_offset
            inside = body[0] <= place < body[1] and not any(begin <= place < end for begin, end in asserts)
        if inside:
            # What is known of a variable outside of the body, such as that it is a module which the file imports,
            # decides between the variants of an instruction.
            name, value = instruction.opname.replace("_CHECK", "").replace("_BORROW", ""), instruction.argval
            if name == "LOAD_METHOD":
                name = "LOAD_ATTR"
            if name == "KW_NAMES":  # `dis` of 3.11 does not know them
                value = code.co_consts[instruction.arg or 0]
            yield name, tuple(position), _comparable(value)


def _comparable(value: object) -> object:
    """What is equal for values that are the same to the last bit; 1 and True are not, nor 0.0 and -0.0."""
    if isinstance(value, CodeType):
        return value.co_name
    if isinstance(value, tuple):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, frozenset):
        return frozenset(_comparable(item) for item in value)
    return type(value), repr(value)
