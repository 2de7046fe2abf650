"""Telling that an invoke sends what an earlier one of its trace has sent.

Many invokes of a trace are one block for several prompts. Where it captured nothing but the model, the tracer, numbers
and text, its payload follows from these, and is made once; only its id and seed are its own.
"""

from __future__ import annotations

from typing import TypeAlias

from ..envoy.envoy import Envoy, RootEnvoy
from .block import TracerHandle
from .capture import Captured, Site

Key: TypeAlias = "tuple[object, ...]"

_SCALARS = frozenset({bool, int, str, type(None)})
"""Types of values that are sent as the same bytes if they are equal; not so `float`, with 0.0 and -0.0."""


def key_of(site: Site, captured: Captured, model: RootEnvoy, tracer: TracerHandle) -> Key | None:
    """What the payload of a block follows from, in the trace of `tracer`.

    Args:
        site: the block.
        captured: what it reads.
        model: the model that is traced.
        tracer: that of the trace around the invokes, while its body runs.

    Returns:
        None if the block reads anything that could change, or that takes more than a look.
    """
    parts: list[object] = [site.tree, site.block]
    for names in captured:
        parts.append(len(names))
        for name, value in names.items():
            kind = type(value)
            if kind in _SCALARS:
                parts += (name, kind, value)
            elif value is tracer:
                parts += (name, TracerHandle, None)
            elif isinstance(value, Envoy) and value.root is model:
                parts += (name, Envoy, value.address)
            else:
                return None
    return tuple(parts)
