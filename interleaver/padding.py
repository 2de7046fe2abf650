"""Frames of C between a block and the bottom of its stack, which errors of torch can walk up safely."""

from __future__ import annotations

import operator
from collections.abc import Callable

_PADDING: list[Callable[..., object]] = [operator.call] * 40
"""Calls through C below a block, of two C frames each; all of them take 4 KiB, which are copied at each switch.

An error of torch walks up to 64 frames of the C stack where it is raised. Above the first frame of a greenlet there is
whatever called it last, not what started it: a walk that gets there crashes the process. So it never gets there.
"""


def padded(run: Callable[[object], None], first: object) -> None:
    """Call `run` with the padding around it."""
    outermost, *others = _PADDING
    outermost(*others, run, first)
