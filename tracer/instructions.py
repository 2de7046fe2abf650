"""Reading the caller's bytecode: does this instruction enter a `with`, which one, and where does its body start.

Instructions carry their position in the source (`co_positions`), and so does the syntax tree; that is how the two are
matched. Nothing here depends on what the instructions do, but for the one that enters a `with` and the one after it
that takes the value for `as`.
"""

from __future__ import annotations

import ast
import dis
import sys
from dataclasses import dataclass
from types import CodeType

_Position = tuple[int | None, int | None, int | None, int | None]  # line, end line, column, end column

_CACHE = 0
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_ENTER = dis.opmap["BEFORE_WITH" if sys.version_info < (3, 14) else "CALL"]
_STORES_NAME = frozenset(
    dis.opmap[name]
    for name in (
        "STORE_FAST",
        "STORE_NAME",
        "STORE_GLOBAL",
        "STORE_DEREF",
        "STORE_FAST_LOAD_FAST",  # 3.13: fused with the first load of a body on the same line, which does no harm
    )
    if name in dis.opmap
)
_STORES_PART = frozenset({dis.opmap["STORE_ATTR"], dis.opmap["STORE_SUBSCR"]})

_MAY_END = (ast.Raise, ast.If, ast.While, ast.Try, ast.Match)  # code after these may be unreachable, and left out
_MAY_VANISH = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Of these, names may be folded away or belong to a code object of their own."""


@dataclass(frozen=True)
class Entry:
    """The instruction that enters a `with`.

    Attributes:
        line: line of the last instruction of the item's expression.
        column: its column in UTF-8 bytes; None where the interpreter keeps no columns.
        start: offset of the instruction at which the body can be left; None if there is none.
        stores: whether that is before the name after `as` is stored.
        positions: source positions of all instructions of the code object.
    """

    line: int
    column: int | None
    start: int | None
    stores: bool
    positions: frozenset[_Position]

    def inside(self, node: ast.expr) -> bool:
        """Whether the instruction belongs to this expression."""
        if self.column is None:
            return node.lineno <= self.line <= (node.end_lineno or node.lineno)
        start = (node.lineno, node.col_offset)
        end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
        return start <= (self.line, self.column) < end

    def stores_fit(self, code: CodeType, tree: ast.With) -> bool:
        """Whether the plain assignments at the top of the body are where the bytecode has them.

        A file that was edited after its import may still have a `with` at the same place.
        """
        if self.column is None:
            return True
        names = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
        for statement in tree.body:
            if isinstance(statement, _MAY_END):
                break
            if not isinstance(statement, ast.Assign):
                continue
            target = statement.targets[0]
            if isinstance(target, ast.Name):
                position = (target.lineno, target.end_lineno, target.col_offset, target.end_col_offset)
                if position not in self.positions or not (target.id.startswith("__") or target.id in names):
                    return False
            for node in ast.walk(statement.value):
                if isinstance(node, _MAY_VANISH):
                    break
                if isinstance(node, ast.Attribute) and not (node.attr.startswith("__") or node.attr in names):
                    return False
        return True


def enter_of(code: CodeType, offset: int) -> Entry | None:
    """The entry of the `with` whose `__enter__` the instruction at `offset` calls; None if it does not."""
    raw = code.co_code
    index = offset // 2
    if not _enters(raw, index):
        return None
    positions: list[_Position] = list(code.co_positions())
    line, _, column, _ = positions[_before(raw, index)]
    if line is None:
        return None
    start, stores = _leave_at(code, raw, index)
    return Entry(line, column, start, stores, frozenset(positions))


def leaving_points(code: CodeType) -> frozenset[int]:
    """Offsets of all instructions of `code` at which the body of some `with` could be left."""
    raw = code.co_code
    points: set[int] = set()
    for index in range(len(raw) // 2):
        if _enters(raw, index):
            start, _ = _leave_at(code, raw, index)
            while start is not None:
                points.add(start)
                start = start + 2 if raw[start] == _EXTENDED_ARG else None
    return frozenset(points)


def _enters(raw: bytes, index: int) -> bool:
    """Whether the instruction calls the `__enter__` of a `with`."""
    if raw[2 * index] != _ENTER:
        return False
    return sys.version_info < (3, 14) or dis.opname[raw[2 * _before(raw, index)]] == "LOAD_SPECIAL"


def _before(raw: bytes, index: int) -> int:
    """The instruction before the one at `index`."""
    index -= 1
    while index > 0 and raw[2 * index] == _CACHE:
        index -= 1
    return index


def _leave_at(code: CodeType, raw: bytes, index: int) -> tuple[int | None, bool]:
    """Where to leave the body, and whether that is before the name after `as` is stored.

    An exception reaches `__exit__` only from instructions that the exception table gives to the `with`: the one that
    takes the value for `as`, and those of the body outside of its own `try` statements. Of a body that starts with
    `try`, or does nothing, only the former is left.
    """
    taken = _next(raw, index)
    start = taken
    while raw[2 * start] == _EXTENDED_ARG:
        start = _next(raw, start)
    if raw[2 * start] == dis.opmap["POP_TOP"]:  # no `as`
        return 2 * taken, False
    named = raw[2 * start] in _STORES_NAME
    while not named and raw[2 * start] not in _STORES_PART:
        start = _next(raw, start)
        if 2 * start >= len(raw):
            return None, False
    start = _next(raw, start)
    handlers = {offset: _handler(code, 2 * offset) for offset in (taken, start)}
    if handlers[taken] == handlers[start]:
        return 2 * start, False
    return (2 * taken, True) if named else (None, False)


def _handler(code: CodeType, offset: int) -> int | None:
    """Where an exception at `offset` goes (CPython's Objects/exception_handling_notes.txt has the format)."""
    table = iter(code.co_exceptiontable)

    def number() -> int | None:
        byte = next(table, None)
        if byte is None:
            return None
        value = byte & 63
        while byte & 64:
            byte = next(table)
            value = value << 6 | byte & 63
        return value

    while (start := number()) is not None:
        length, target, _ = number(), number(), number()
        if length is not None and 2 * start <= offset < 2 * (start + length):
            return target
    return None


def _next(raw: bytes, index: int) -> int:
    """The instruction after the one at `index`, counted in code units."""
    index += 1
    while 2 * index < len(raw) and raw[2 * index] == _CACHE:
        index += 1
    return index
