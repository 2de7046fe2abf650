"""Saving values from a block.

In the body of a block, ``x.save()`` works on any object: the capture rewrites it to a call of `save`. `invivo.save(x)`
does the same, also in helper functions, which are not rewritten.
"""

from __future__ import annotations

from typing import Any, TypeVar

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


def save_method(value: Any, *argument: object, names: tuple[str, ...] = (), **stream: bool) -> object:
    """What ``value.save()`` in the body of a block becomes, and ``value(argument)`` if `value` is called save there.

    An object's own `save` method goes first, and another function is called as it was written.

    Args:
        value: the object before the dot, or the function.
        argument: that of the function.
        names: the variables that the statement binds to the result, or that the saved object was read from.
        stream: as in `save`, if it is given there.
    """
    if argument:
        if value is not save:
            return value(*argument, **stream)
        return active.saver("`save`").save(*argument, stream=stream.get("stream", False), names=names)
    own = getattr(value, "save", None)
    if callable(own):
        return own(**stream)
    return active.saver("`.save()`").save(value, stream=stream.get("stream", False), names=names)
