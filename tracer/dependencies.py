"""Which invokes of a trace wait for which, as their groups say."""

from __future__ import annotations

from collections.abc import Sequence

from ..envoy.errors import MisuseError
from .block import Group


def check_barriers(groups: Sequence[Group]) -> None:
    """Refuse barriers that can never fill.

    Args:
        groups: those of all invokes of the trace, in their order.

    Raises:
        MisuseError: too few invokes refer to one, or some of them would have to end first, since others take values
            from them.
    """
    after = ends_before(groups)
    for count, indices in _barriers(groups).values():
        shown = ", ".join(map(str, indices))
        if len(indices) < count:
            raise MisuseError(
                f"a barrier waits for {count} blocks, and {len(indices)} of the trace refer to it (invokes {shown}). "
                "Give `tracer.barrier` the number of blocks that call it."
            )
        for index in indices:
            if sum(index not in after[other] for other in indices) < count:
                later = next(other for other in indices if index in after[other])
                names = ", ".join(f"`{name}`" for name, source in groups[later].takes if source == index)
                raise MisuseError(
                    f"invoke {index} waits at a barrier for invoke {later}, which begins only when invoke {index} has "
                    f"ended, since it takes {names or 'a value'} over from it. Hand the value over in a dict that is "
                    "made in front of the invokes (`box = {}`), or leave the barrier out."
                )


def ends_before(groups: Sequence[Group]) -> list[set[int]]:
    """For each invoke, those whose blocks end before it begins: it takes values from them, or from others that do."""
    after: list[set[int]] = []
    for group in groups:
        sources = {index for _, index in group.takes}
        after.append(sources.union(*(after[source] for source in sources)))
    return after


def meets(groups: Sequence[Group]) -> list[set[int]]:
    """For each invoke, those whose requests must have ended before its block can be told that nobody comes any more.

    These are the ones that it meets at barriers, that they meet, and so on; but not those that begin after it.
    """
    after = ends_before(groups)
    together = [{index} for index in range(len(groups))]
    for _, indices in _barriers(groups).values():
        joined = set[int]().union(*(together[index] for index in indices))
        for index in joined:
            together[index] = joined
    return [{other for other in together[index] if index not in after[other]} for index in range(len(groups))]


def _barriers(groups: Sequence[Group]) -> dict[str, tuple[int, list[int]]]:
    """For each barrier, how many blocks meet there, and which invokes refer to it."""
    found: dict[str, tuple[int, list[int]]] = {}
    for group in groups:
        for key, count in group.barriers:
            found.setdefault(key, (count, []))[1].append(group.index)
    return found
