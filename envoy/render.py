"""A module tree as text and as HTML.

Runs of children of the same shape (the layers of a transformer) are shown once, with their numbers.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from .address import join

if TYPE_CHECKING:
    from .tree import ModuleTree


class _Row(NamedTuple):
    label: str
    address: str
    times: int


def tree_text(tree: ModuleTree, address: str = "") -> str:
    """The tree below `address`: indented addresses, classes and, once known, output shapes."""
    lines: list[tuple[str, str]] = [(address or "(model)", _described(tree, address))]
    _text(tree, address, 1, lines)
    width = max(len(left) for left, _ in lines)
    return "\n".join(f"{left:<{width}}  {right}" for left, right in lines)


def tree_html(tree: ModuleTree, address: str = "") -> str:
    """The same as nested ``<details>``, closed below the second level."""
    return f'<div style="font-family:monospace">{_html(tree, address, address or "(model)", 0)}</div>'


def _text(tree: ModuleTree, address: str, depth: int, lines: list[tuple[str, str]]) -> None:
    for row in _rows(tree, address):
        lines.append(("  " * depth + row.label, _described(tree, row.address, row.times)))
        _text(tree, row.address, depth + 1, lines)


def _html(tree: ModuleTree, address: str, label: str, depth: int, count: int = 1) -> str:
    head = f"<b>{escape(label)}</b> {escape(_described(tree, address, count))}"
    rows = _rows(tree, address)
    if not rows:
        return f'<div style="margin-left:1em">{head}</div>'
    inside = "".join(_html(tree, row.address, row.label, depth + 1, row.times) for row in rows)
    opened = " open" if depth < 2 else ""
    return f'<details{opened} style="margin-left:1em"><summary>{head}</summary>{inside}</details>'


def _described(tree: ModuleTree, address: str, count: int = 1) -> str:
    times = f"{count} x " if count > 1 else ""
    shape = tree.shapes.get(address)
    return f"{times}{tree.modules[address].class_name}" + (f" -> {shape}" if shape else "")


def _rows(tree: ModuleTree, address: str) -> list[_Row]:
    """Children of `address`, runs of equal ones together."""
    names = tree.modules[address].children
    rows: list[_Row] = []
    start = 0
    while start < len(names):
        first = join(address, names[start])
        form = _form(tree, first)
        end = start + 1
        while names[start].isdigit() and end < len(names) and _form(tree, join(address, names[end])) == form:
            end += 1
        label = names[start] if end - start == 1 else f"{names[start]}-{names[end - 1]}"
        rows.append(_Row(label, first, end - start))
        start = end
    return rows


def _form(tree: ModuleTree, address: str) -> tuple[object, ...]:
    info = tree.modules[address]
    inside = tuple((name, _form(tree, join(address, name))) for name in info.children)
    return (info.class_name, tree.shapes.get(address), inside)
