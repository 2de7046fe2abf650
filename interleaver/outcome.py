"""What goes home when a block has ended: the named saves, its failure, its output and its warnings."""

from __future__ import annotations

import torch

from ..envoy.errors import SaveError
from ..envoy.tree import Learned
from ..tracer.backend import Reply
from ..tracer.failure import describe
from ..tracer.results import pack
from .launch import Launched
from .lost import reachable_ids
from .mediator import Mediator, Saved


def reply_of(launched: Launched, learned: Learned | None) -> Reply:
    """The reply of a block that has ended; a value that cannot be sent becomes its failure."""
    mediator = launched.mediator
    named = named_saves(mediator)
    failure = mediator.failure
    try:
        saves = pack(named)
    except SaveError as error:
        saves = pack({})
        failure = failure or error
    port = str(mediator.failed_at) if mediator.failed_at is not None else None
    described = None if failure is None else describe(failure, port=port, step=mediator.step)
    reply = Reply(saves, described, _printed(launched), tuple(mediator.warnings), learned)
    mediator.forget()
    return reply


def _printed(launched: Launched) -> str:
    return launched.printed.getvalue() if launched.printed is not None else ""


def named_saves(mediator: Mediator) -> dict[str, object]:
    """Saved values by the names that hold them at the end of the block.

    Objects are recognised by identity; numbers and strings, of which Python shares equal ones, by the name that the
    saving statement gave them. A saved value that no name holds, directly or in a saved container, is warned about.
    """
    scope = mediator.scope
    by_identity = {id(entry.value) for entry in mediator.saved if not _shared(entry.value)}
    named = {name: value for name, value in scope.items() if id(value) in by_identity}
    for entry in mediator.saved:
        for name in entry.names:
            if name in scope and scope[name] is entry.value:
                named[name] = entry.value
    held = {identity for value in named.values() for identity in reachable_ids(value)}
    for entry in mediator.saved:
        if id(entry.value) not in held:
            mediator.warnings.append((_unheld(entry), entry.line))
    return named


def _unheld(entry: Saved) -> str:
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


def _shared(value: object) -> bool:
    """Whether Python may use one object for equal values of this kind."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple | torch.dtype)
