"""Which names hold what was saved."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping


class Saved:
    """A value that was saved, where, under which names the statement puts it, and whether it was sent already."""

    def __init__(self, value: object, names: tuple[str, ...], line: int, sent: bool = False) -> None:
        self.value = value
        self.names = names
        self.line = line
        self.sent = sent


def saved_by_name(scope: Mapping[str, object], saved: Iterable[Saved]) -> dict[str, object]:
    """Saved values by the names that hold them in `scope`.

    Objects are recognised by identity; numbers and strings, of which Python shares equal ones, by the name that the
    saving statement gave them.
    """
    entries = list(saved)
    by_identity = {id(entry.value) for entry in entries if not _one_for_all(entry.value)}
    named = {name: value for name, value in scope.items() if id(value) in by_identity}
    for entry in entries:
        for name in entry.names:
            if name in scope and scope[name] is entry.value:
                named[name] = entry.value
    return named


def unheld(entry: Saved) -> str:
    """The warning for a saved value that no name holds in the end."""
    if entry.names:
        names = ", ".join(f"`{name}`" for name in entry.names)
        return (
            f"the value saved here as {names} is lost: at the end of the block the name held another one. Save it "
            "after its last change, or under a name of its own."
        )
    return (
        "the value saved here is lost: at the end of the block no variable held it. Bind it to a name "
        "(`h = x.save()`), or save the container it is in."
    )


def held(values: Iterable[object]) -> set[int]:
    """Identities of the values and of everything inside their containers."""
    found: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if id(value) in found:
            continue
        found.add(id(value))
        if isinstance(value, list | tuple | set | frozenset | deque):
            todo.extend(value)
        elif isinstance(value, dict):
            todo.extend([*value, *value.values()])
    return found


def _one_for_all(value: object) -> bool:
    """Whether Python may use one object for equal values of this kind."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return True
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple)
