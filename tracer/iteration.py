"""Following the steps of a request: ``tracer.iter[...]``.

Step 0 is the whole prompt; step k turns generated token k into token k+1. Asking for a step suspends the block until
the model starts it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeAlias

from ..envoy import active
from ..envoy.errors import StepError

Key: TypeAlias = "int | slice | list[int] | tuple[int, ...] | range"


class Steps:
    """``tracer.iter``: index it with a step, a slice or a list of steps to get something to loop over."""

    def __getitem__(self, key: Key) -> StepRange:
        return StepRange(key)

    def __iter__(self) -> Iterator[int]:
        return iter(StepRange(slice(None)))


class StepRange:
    """The steps of one loop; each is yielded when the model has come to it.

    An open range (``[:]``, ``[2:]``) ends with the request. A bounded one that the request could not fill ends too,
    with a warning that says how many steps ran.
    """

    def __init__(self, key: Key) -> None:
        self._key = key
        self._total = _steps(key)[1]

    def __iter__(self) -> Iterator[int]:
        session = active.session("`tracer.iter`")
        for ran, step in enumerate(_steps(self._key)[0]):
            if not session.advance(step):
                if self._total is not None:
                    session.warn(
                        f"`tracer.iter[{_shown(self._key)}]` ran {ran} of {self._total} steps: the request ended "
                        f"before step {step}. Raise `max_tokens`, or use an open range such as `[{step}:]`."
                    )
                return
            yield step


def _steps(key: Key) -> tuple[Iterable[int], int | None]:
    """The steps that a key selects, and how many they are (None: open)."""
    to_list = getattr(key, "tolist", None)  # of a tensor or an array
    if to_list is not None:
        key = to_list()
    if isinstance(key, slice):
        start = 0 if key.start is None else _whole(key.start, key)
        stride = 1 if key.step is None else _whole(key.step, key)
        stop = None if key.stop is None else _whole(key.stop, key)
        if start < 0 or stride < 1 or (stop is not None and stop < 0):
            raise StepError(
                f"`tracer.iter[{_shown(key)}]`: steps are counted from 0 forwards, since the number of steps is not "
                "known before the request ends."
            )
        if stop is None:
            return count(start, stride), None
        bounded = range(start, stop, stride)
        return bounded, len(bounded)
    listed = key if isinstance(key, list | tuple | range) else [key]
    wanted = [_whole(step, key) for step in listed]
    if any(step < 0 for step in wanted):
        raise _no_step(key)
    if sorted(set(wanted)) != wanted:
        raise StepError(f"`tracer.iter[{_shown(key)}]`: list the steps once each, in increasing order.")
    return wanted, len(wanted)


def _whole(step: object, key: Key) -> int:
    """A step as an int, also if it is an integer of numpy or torch."""
    if isinstance(step, bool):
        raise _no_step(key)
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise _no_step(key) from None


def _no_step(key: Key) -> StepError:
    return StepError(f"`tracer.iter[{_shown(key)}]`: a step is a whole number from 0 on.")


def _shown(key: Key) -> str:
    if not isinstance(key, slice):
        return repr(key)
    ends = ["" if end is None else str(end) for end in (key.start, key.stop)]
    return ":".join(ends + ([str(key.step)] if key.step is not None else []))
