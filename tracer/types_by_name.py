"""Finding a class by its name among those that are loaded already.

Nothing is imported and no attribute hook runs: names are looked up in the `__dict__` of modules and classes
only, so a name that came from elsewhere can do no more than find a class or not.
"""

from __future__ import annotations

import sys
from typing import TypeVar

T = TypeVar("T")


def full_name(module: str, qualname: str) -> str:
    """The name of a class as tracebacks show it: without ``builtins`` and ``__main__``."""
    return qualname if module in ("builtins", "__main__") else f"{module}.{qualname}"


def find_type(module: str, qualname: str, base: type[T]) -> type[T] | None:
    """The class `qualname` of `module`, if it is loaded and derives from `base`.

    A class that was made in a function (``f.<locals>.E``) is no attribute of anything; it is looked for among
    the subclasses of `base`, where the latest one of that name is taken.
    """
    if "<locals>" in qualname:
        return _among_subclasses(module, qualname, base)
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        try:
            found = object.__getattribute__(found, "__dict__")[part]
        except (AttributeError, KeyError, TypeError):
            return None
    return found if isinstance(found, type) and base in type.mro(found) else None


def _among_subclasses(module: str, qualname: str, base: type[T]) -> type[T] | None:
    latest = None
    seen = {base}
    todo: list[type[T]] = [base]
    while todo:
        for kind in type.__subclasses__(todo.pop()):
            if kind in seen:
                continue
            seen.add(kind)
            todo.append(kind)
            if kind.__qualname__ == qualname and kind.__module__ == module:
                latest = kind
    return latest
