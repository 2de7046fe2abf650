"""From a payload to a mediator: rebuild the values, compile the source, and know what to run."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

from ..envoy.errors import VersionError
from ..tracer.block import FORMAT, Block, Payload
from ..tracer.codec import decode
from ..tracer.program import Program, compile_block
from ..tracer.saves import save_method
from .limits import Limits
from .lost import Snapshot
from .mediator import Mediator
from .modes import Turns
from .streamed import Streamed

if TYPE_CHECKING:
    import torch

    from ..envoy.envoy import Envoy
    from ..envoy.tree import ModuleTree
    from .group import Groups


class Launched:
    """A mediator together with what it printed and the block that it runs."""

    def __init__(self, mediator: Mediator, block: Block, printed: io.StringIO | None) -> None:
        self.mediator = mediator
        self.block = block
        self.printed = printed


def launch(
    payload: Payload,
    tree: ModuleTree,
    envoy: Callable[[str], Envoy],
    device: torch.device | None = None,
    *,
    capture_output: bool,
    groups: Groups | None = None,
    limits: Limits | None = None,
    kind: type[Mediator] = Mediator,
) -> Launched:
    """Make the mediator of one request.

    Args:
        payload: what the caller sent.
        tree: the model's tree.
        envoy: gives the Envoy of an address.
        device: where captured tensors go; None leaves them on the CPU.
        capture_output: keep what the block prints, instead of letting it out here.
        groups: the traces of several blocks that run here; the payload may be one of these.
        limits: of the block.
        kind: of mediator.

    The payload is checked and decoded in the block's first turn, so whatever fails in it is an error of the block.
    """
    printed = io.StringIO() if capture_output else None
    member = groups.join(payload.group) if groups is not None and payload.group is not None else None

    def body(mediator: Mediator) -> dict[str, object]:
        _check_format(payload)
        read = partial(decode, envoy=envoy, tracer=mediator.tracer, device=device)
        if member is None:
            values = read(payload.values, payload.tensors)
            return _run(payload, compile_block(payload.block), values, mediator)
        member.load(read)
        values = read(payload.values, member.tensors(payload), shared=member.shared)
        return _run(
            payload, compile_block(payload.block), values, mediator, member.take(mediator.warn), member.shared_ids
        )

    mediator = kind(tree, Turns(payload.seed, printed, payload.uses), body, limits)
    if member is not None:
        mediator.member, mediator.index, member.mediator = member, member.index, mediator
        mediator.alone = member.alone
    mediator.line = lambda: line_in(payload.block, sys._getframe(1))
    mediator.streamed = Streamed() if payload.streams else None
    return Launched(mediator, payload.block, printed)


def _check_format(payload: Payload) -> None:
    if payload.version != FORMAT:
        raise VersionError(
            f"the trace was sent in format {payload.version}, and this engine reads format {FORMAT}: use the same "
            "version of invivo on both sides."
        )


def _run(
    payload: Payload,
    program: Program,
    values: dict[str, dict[str, object]],
    mediator: Mediator,
    taken: Mapping[str, object] = MappingProxyType({}),
    shared: Collection[int] = (),
) -> dict[str, object]:
    local, outer = dict(values["local"]), dict(values["global"])
    if payload.block.tracer is not None:
        (outer if payload.block.scope == "module" else local)[payload.block.tracer] = mediator.tracer
    snapshot = Snapshot({**outer, **local}, shared)
    local.update(taken)
    extras: dict[str, object] = {"__invivo_save__": save_method}
    try:
        scope = program.run(local, outer, extras)
    except BaseException as error:
        mediator.scope = program.scope_of(error.__traceback__)
        raise
    for message in snapshot.lost(mediator.saved):
        mediator.warn(message)
    return scope


def line_in(block: Block, frame: FrameType | None) -> int:
    """The line of the block that a frame, or one of those that called it, is in; 0 if none is."""
    last = block.lineno + block.source.count("\n")
    while frame is not None:
        if frame.f_code.co_filename == block.filename and block.lineno <= frame.f_lineno <= last:
            return frame.f_lineno
        frame = frame.f_back
    return 0
