"""Several samples of one prompt (``n``): a request and a block for each, as vLLM makes requests of its own for them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING
from uuid import uuid4

from msgspec import structs
from vllm import RequestOutput

from ..envoy.errors import MisuseError
from ..tracer.backend import Reply
from ..tracer.block import Payload
from ..tracer.results import pack, unpack

if TYPE_CHECKING:
    from .sync import Request


def split(payload: Payload, request: Request) -> list[tuple[Payload, Request]]:
    """One block and request for each sample.

    A given seed is counted up from sample to sample, for the sampling as vLLM does it, and for the blocks as well.
    """
    if request.params.n == 1:
        return [(payload, request)]
    found = []
    for index in range(request.params.n):
        params = request.params.clone()
        params.n = 1
        if params.seed is not None:
            params.seed += index
        own = structs.replace(payload, trace=uuid4().hex, seed=payload.seed + index)
        found.append((own, request._replace(params=params)))
    return found


def split_group(
    payloads: Sequence[Payload], requests: Sequence[Request]
) -> tuple[list[tuple[Payload, Request]], list[int]]:
    """The same for the invokes of a trace.

    The first samples of all invokes come first, so that they keep the numbers of these; the others come after them.

    Returns:
        Blocks and requests, and for each the number of the invoke that it is a sample of.

    Raises:
        MisuseError: it is not clear which sample others wait for.
    """
    samples = [split(payload, request) for payload, request in zip(payloads, requests, strict=True)]
    invokes = [*range(len(samples)), *(invoke for invoke, own in enumerate(samples) for _ in own[1:])]
    every = [own[0] for own in samples] + [one for own in samples for one in own[1:]]
    found = []
    for index, (payload, request) in enumerate(every):
        group = payload.group
        assert group is not None, "invokes have one"
        sampled = len(samples[invokes[index]]) > 1
        if sampled and (group.gives or group.barriers):
            why = f"hands `{group.gives[0]}` on to a later one" if group.gives else "has a barrier"
            raise MisuseError(
                f"invoke {group.index} has `n={len(samples[group.index])}` and {why}, and it is not clear which of its "
                "samples is meant. Make an invoke for each sample, with a `seed` of its own."
            )
        group = structs.replace(group, index=index, size=len(every), sampled=sampled)
        found.append((structs.replace(payload, group=group), request))
    return found, invokes


def rejoined(outcomes: Sequence[tuple[Reply, RequestOutput]], invokes: Sequence[int]) -> list[tuple[Reply, object]]:
    """What came home of the samples, as one for each invoke (see `split_group`)."""
    return [
        joined([outcome for outcome, number in zip(outcomes, invokes, strict=True) if number == invoke])
        for invoke in dict.fromkeys(invokes)
    ]


def joined(samples: Sequence[tuple[Reply, RequestOutput]]) -> tuple[Reply, RequestOutput]:
    """The samples as one: lists of saves, one output with a completion for each.

    A save is a list with one value for each sample, None where a block did not get to it. The first failure counts.
    """
    if len(samples) == 1:
        return samples[0]
    replies = [reply for reply, _ in samples]
    saves = [unpack(reply.saves) for reply in replies]
    names = dict.fromkeys(name for one in saves for name in one)
    reply = Reply(
        pack({name: [one.get(name) for one in saves] for name in names}),
        next((reply.failure for reply in replies if reply.failure is not None), None),
        "".join(reply.printed for reply in replies),
        tuple(dict.fromkeys(warning for reply in replies for warning in reply.warnings)),
        next((reply.learned for reply in replies if reply.learned is not None), None),
        next((reply.shared for reply in replies if reply.shared is not None), None),
    )
    output = copy(samples[0][1])
    output.outputs = [completion for _, one in samples for completion in one.outputs]
    for index, completion in enumerate(output.outputs):
        completion.index = index
    return reply, output
