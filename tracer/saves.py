"""Saving values from a block.

In the body of a block, ``x.save()`` works on any object: the capture rewrites it to a call of `save`. In helper
functions, which are not rewritten, `invivo.save(x)` does the same.
"""

from __future__ import annotations

from typing import TypeVar

from ..envoy import active

T = TypeVar("T")


def save(value: T, *, stream: bool = False) -> T:
    """Send `value` home when the block ends; returns it.

    What arrives is the value as it is at the end of the block: tensors (on the CPU, same dtype), numpy arrays, numbers,
    strings, and containers of these. Names of the block that hold it then are bound in the caller's scope.

    Args:
        value: the object to save.
        stream: also send it with the output of the step in which it was saved.

    Raises:
        OutsideBlockError: no block is running.
    """
    active.saver("`save`").save(value, stream=stream, names=())
    return value


def save_method(value: object, *, stream: bool = False, names: tuple[str, ...] = ()) -> object:
    """What ``value.save()`` in the body of a block becomes; an object's own `save` method goes first.

    Args:
        value: the object before the dot.
        stream: as in `save`.
        names: the variables that the statement binds to the result, or that `value` was read from.
    """
    own = getattr(value, "save", None)
    if callable(own):
        return own(stream=stream) if stream else own()
    return active.saver("`.save()`").save(value, stream=stream, names=names)
