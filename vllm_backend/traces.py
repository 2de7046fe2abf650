"""The traces that a worker knows: those that run, and those whose caller has yet to fetch the reply."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from ..envoy.errors import InternalError
from ..interleaver.hub import Hub
from ..interleaver.launch import Launched
from ..interleaver.outcome import failure_of, reply_of
from ..tracer.backend import Reply
from .in_band import Cargo
from .outbox import Outbox

KEPT_SECONDS = 60.0
"""How long the block of a request that has left the engine waits for its caller to fetch the reply."""

KEPT = 256
"""How many such blocks wait at most; the oldest go first."""


class Known:
    """One trace.

    Attributes:
        request_id: the engine's id of its request.
        launched: its block.
        group: the trace of several invokes that it belongs to. If there is none, the reply goes home with the outputs,
            provided that the block ends before its request does.
        reply: the reply that went, or waits to be fetched.
        parcel: the one that waits, ready to be sent.
        left: when its request left the engine.
    """

    def __init__(self, request_id: str, launched: Launched, group: str | None = None) -> None:
        self.request_id = request_id
        self.launched = launched
        self.group = group
        self.reply: Reply | None = None
        self.parcel: bytes | None = None
        self.left: float | None = None

    @property
    def gone(self) -> bool:
        """Whether the reply went with the outputs."""
        return self.reply is not None and self.group is None

    @property
    def own(self) -> bool:
        """Whether no other block may change what this one saved, so that it can be copied later."""
        member = self.launched.mediator.member
        return member is None or member.own


class Traces:
    """All of them, by the id of the trace.

    Args:
        outbox: takes the replies.
        last: replies are made here; elsewhere, blocks without a group are gone with their requests.
    """

    def __init__(self, outbox: Outbox, *, last: bool = True) -> None:
        self._outbox = outbox
        self._last = last
        self._known: dict[str, Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, trace: str, known: Known) -> None:
        """Take in a trace that begins."""
        self._known[trace] = known

    def knows(self, trace: str) -> bool:
        """Whether it is there."""
        return trace in self._known

    def grouped(self, trace: str) -> str | None:
        """The request of a trace that is one of several invokes, if it is there."""
        known = self._known.get(trace)
        return known.request_id if known is not None and known.group is not None else None

    def fetched(self, trace: str) -> Known:
        """Take out a trace whose caller fetches the reply.

        Raises:
            InternalError: there is none, or its reply has gone in band.
        """
        known = self._known.get(trace)
        if known is None or known.gone:
            raise InternalError(f"the engine has no trace {trace}: it never started, or its reply was sent before.")
        return self._known.pop(trace)

    def given_up(self, trace: str) -> Known | None:
        """Take out a trace whose caller has given up, if it is there."""
        return self._known.pop(trace, None)

    def cargo(self, hub: Hub) -> dict[str, Cargo]:
        """By request, what goes home with the step that is over: streamed values, and replies of blocks that ended."""
        cargo = {}
        for trace, known in self._known.items():
            mediator = known.launched.mediator
            streamed = mediator.streamed.take() if mediator.streamed is not None else []
            ready = mediator.done and known.left is None and (known.group is None or known.own)
            reply = self._reply(trace, known, hub) if ready else None
            if known.group is not None and reply is not None:  # it is fetched, but the copy of what it saved begins now
                known.parcel, reply = reply, None
            if streamed or reply is not None:
                cargo[known.request_id] = Cargo(streamed, reply)
        return cargo

    def leave(self, requests: Collection[str], hub: Hub, now: float) -> None:
        """Requests have left the engine, at this time: forget those whose reply has gone, and in time all others."""
        if not requests and all(known.left is None for known in self._known.values()):
            return
        for trace, known in list(self._known.items()):
            if known.request_id in requests and known.left is None:
                known.left = now
                if known.gone or (not self._last and known.group is None):
                    self._outbox.release(trace)
                    self._forget(trace, hub)
                else:
                    hub.left(known.request_id)
        running = {known.group for known in self._known.values() if known.left is None and known.group is not None}
        waiting = []
        for trace, known in self._known.items():
            if known.left is None:
                continue
            if known.group in running:
                known.left = now  # the caller may wait for those that they have met at a barrier
            else:
                waiting.append((known.left, trace))
        for at, (left, trace) in enumerate(sorted(waiting, reverse=True)):
            if at >= KEPT or now - left > KEPT_SECONDS:
                self._outbox.drop(trace)
                self._forget(trace, hub)

    def _forget(self, trace: str, hub: Hub) -> None:
        hub.remove(self._known.pop(trace).request_id)

    def parcel(self, trace: str, known: Known, hub: Hub) -> bytes:
        """What is sent to a caller that fetches the reply of a block that has ended."""
        parcel = self._reply(trace, known, hub)
        self._outbox.release(trace)
        if parcel is None:
            parcel = known.parcel
        assert parcel is not None, "it was not fetched before"
        return parcel

    def _reply(self, trace: str, known: Known, hub: Hub) -> bytes | None:
        """The reply, ready to be sent, of a block that has ended; None if it has gone already.

        A block that has ended well may fail later: its request was computed again, without the block's edits.
        """
        mediator = known.launched.mediator
        if known.reply is None:
            first = mediator.index == 0  # of its trace
            known.reply = reply_of(known.launched, hub.learned if first else None, later=known.own)
        elif mediator.failure is not None:
            known.reply = structs.replace(known.reply, failure=failure_of(known.launched))
            mediator.forget()
        else:
            return None
        return self._outbox.send(trace, known.reply, held=True)
