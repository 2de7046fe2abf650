"""What goes home when a block has ended: the named saves, its failure, its output and its warnings."""

from __future__ import annotations

import re

from msgspec import structs

from ..envoy.address import INPUT, OUTPUT, shown
from ..envoy.errors import InternalError, SaveError, WriteError
from ..envoy.tree import Learned
from ..tracer.backend import Reply
from ..tracer.block import Block
from ..tracer.failure import Failure, describe
from ..tracer.naming import held, saved_by_name, unheld
from ..tracer.results import Packed, pack
from ..tracer.tracebacks import FrameLine, valid
from .launch import Launched
from .mediator import Mediator

_HOW_TO_SAVE = (
    "`x.save()` is for the body of the `with` and takes no name: what is saved comes home under the name of the "
    "variable that holds it. In helper functions, write `invivo.save(x)`."
)


def reply_of(launched: Launched, learned: Learned | None, *, in_model: bool = False, later: bool = False) -> Reply:
    """The reply of a block that has ended; a value that cannot be sent becomes its failure.

    Args:
        launched: the block.
        learned: what its reply tells of the model.
        in_model: it was the model's own forward that failed.
        later: saves that are on a device stay there (`Unsent`).
    """
    mediator = launched.mediator
    _check_saves(mediator)
    values = named_saves(mediator)
    failure = failure_of(launched, in_model=in_model)
    try:
        saves = pack(values, later=later)
    except SaveError as error:
        saves = pack({name: value for name, value in values.items() if _can_be_sent(value)}, later=later)
        failure = failure or _unsendable(launched, values, error)
    if mediator.stopped and mediator.failure is None:
        mediator.warnings.extend(_unreached(launched.block, mediator))
    shared, failure = _shared(launched, failure)
    reply = Reply(saves, failure, _printed(launched), tuple(mediator.warnings), learned, shared)
    mediator.forget()
    return reply


def _check_saves(mediator: Mediator) -> None:
    """Whether what comes home is within the limit; else that is the block's failure, and what fits is kept."""
    values, error = mediator.within_limit(saved_by_name(mediator.scope, mediator.saved))
    if error is not None:
        mediator.failure = mediator.failure or error
        mediator.scope = values


def _shared(launched: Launched, failure: Failure | None) -> tuple[Packed | None, Failure | None]:
    """What was saved around the invokes, if this block is the last of them; and the failure of that or of the block."""
    mediator = launched.mediator
    home = mediator.member.leave() if mediator.member is not None else None
    if home is None:
        return None, failure
    home, over = mediator.within_limit(home)
    if over is not None:
        failure = failure or describe(over)
    try:
        return pack(home), failure
    except SaveError as error:
        kept = pack({name: value for name, value in home.items() if _can_be_sent(value)})
        return kept, failure or describe(error)


def _unreached(block: Block, mediator: Mediator) -> list[tuple[str, int]]:
    """A warning for every save that stands after the `tracer.stop()` that was called, and so did not happen."""
    message = (
        f"`tracer.stop()` in line {mediator.stopped_at} left the block before this save. Save before the loop or the "
        "stop: what is sent home is the value at the end in any case."
    )
    saved = {entry.line for entry in mediator.saved}
    return [
        (message, number)
        for number, text in enumerate(block.source.splitlines(), block.lineno)
        if number > mediator.stopped_at and number not in saved and re.search(r"\bsave\(", text.partition("#")[0])
    ]


def failure_of(launched: Launched, *, in_model: bool = False) -> Failure | None:
    """What ended the block; at a line of the block in any case, unless it was raised in the model."""
    block, mediator = launched.block, launched.mediator
    if mediator.failure is None:
        return None
    if isinstance(mediator.failure, AttributeError) and mediator.failure.name == "save":
        mediator.failure.add_note(_HOW_TO_SAVE)
    port = str(mediator.failed_at) if mediator.failed_at is not None else None
    failure = describe(mediator.failure, port=port, step=mediator.step)
    if isinstance(mediator.failure, AttributeError):
        failure = structs.replace(failure, notes=(*failure.notes, *_named_like_ports(mediator)))
    in_block = any(frame.filename == block.filename for frame in failure.frames)
    if in_model or in_block or isinstance(mediator.failure, InternalError):
        return failure
    # An edit is checked after the last line; whatever else has no line of its own came before the first.
    last = len(block.source.splitlines()) - 1
    return structs.replace(failure, frames=(_line(block, last if isinstance(mediator.failure, WriteError) else 0),))


def _named_like_ports(mediator: Mediator) -> list[str]:
    """For an attribute that a value does not have: a module inside of the port's may have been meant."""
    port = mediator.failed_at
    info = mediator.tree.modules.get(port.address) if port is not None and not port.of_step else None
    names = [name for name in (info.children if info is not None else ()) if name in (INPUT, "inputs", OUTPUT)]
    return [
        f'{shown(port.address)} has a module `{name}` as well, which is written `["{name}"]`.' for name in names if port
    ]


def _line(block: Block, index: int) -> FrameLine:
    """A line of the block as a line of a traceback; line 0 is the `with`."""
    return FrameLine(block.filename, block.lineno + index, block.name, block.source.splitlines()[index].strip())


def _can_be_sent(value: object) -> bool:
    try:
        pack({"value": value}, later=True)
    except SaveError:
        return False
    return True


def _unsendable(launched: Launched, named: dict[str, object], error: SaveError) -> Failure:
    """The failure of a save, at the line that saved the value."""
    block, mediator = launched.block, launched.mediator
    bad = [id(value) for value in named.values() if not _can_be_sent(value)]
    line = next((entry.line for entry in mediator.saved if id(entry.value) in bad), block.lineno)
    return structs.replace(describe(error), frames=(_line(block, max(line - block.lineno, 0)),))


def _printed(launched: Launched) -> str:
    return valid(launched.printed.getvalue()) if launched.printed is not None else ""


def named_saves(mediator: Mediator) -> dict[str, object]:
    """Saved values by the names that hold them at the end of the block.

    A saved value that no name holds, directly or in a saved container, is warned about, unless it was sent when it was
    saved.
    """
    saves = saved_by_name(mediator.scope, mediator.saved)
    if mediator.failure is not None:
        return saves
    named = set(map(id, saves.values()))
    unnamed = [entry for entry in mediator.saved if not entry.sent and id(entry.value) not in named]
    if unnamed:  # usually none, and what is held takes long to go through
        kept = held(saves.values())
        mediator.warnings += [(unheld(entry), entry.line) for entry in unnamed if id(entry.value) not in kept]
    return saves
