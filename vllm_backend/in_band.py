"""Saves on their way home with the outputs of their request.

The worker puts parcels on the `ModelRunnerOutput` of a step, the scheduler takes them from there and puts them on the
`EngineCoreOutput` of the request, and the client finds them on the `RequestOutput`. Of all fields of an
`EngineCoreOutput`, two dictionaries reach every `RequestOutput` of `LLM` and `AsyncLLM`, one of each step as well as
the last: `kv_transfer_params` and `ec_transfer_params`. The OpenAI server writes the first into its answers, where
bytes make it fail; nothing but encoder caches on other machines uses the second, so that is the one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .settings import KEY

if TYPE_CHECKING:
    from vllm import RequestOutput


class Parcel(NamedTuple):
    """What one request sends home.

    Attributes:
        streamed: `results.pack` of each value that was streamed, in order.
        reply: the encoded `Reply`, if the block has ended.
    """

    streamed: list[bytes]
    reply: bytes | None


class Transit:
    """Parcels in the scheduler, each until its request has an output.

    A reply waits for the last output: a client that asks for the finished output alone would not see the others.
    """

    def __init__(self) -> None:
        self._parcels: dict[str, Parcel] = {}

    def add(self, parcels: Mapping[str, Parcel]) -> None:
        """Take in what the worker has sent with a step; a newer reply takes the place of an older one."""
        for request_id, (streamed, reply) in parcels.items():
            before = self._parcels.get(request_id, _NOTHING)
            self._parcels[request_id] = Parcel(before.streamed + streamed, reply or before.reply)

    def attach(self, outputs: Iterable[Any]) -> None:
        """Put parcels on the outputs (`EngineCoreOutput`) of a step."""
        for output in outputs:
            parcel = self._parcels.pop(output.request_id, None)
            if parcel is None:
                continue
            if not output.finished:
                if parcel.reply is not None:
                    self._parcels[output.request_id] = Parcel([], parcel.reply)
                parcel = Parcel(parcel.streamed, None)
            if parcel != _NOTHING:
                output.ec_transfer_params = {**(output.ec_transfer_params or {}), KEY: list(parcel)}

    def keep(self, requests: Collection[str]) -> None:
        """Forget all requests but these."""
        for request_id in self._parcels.keys() - requests:
            del self._parcels[request_id]


_NOTHING = Parcel([], None)


def unpacked(output: RequestOutput) -> Parcel:
    """Take the parcel, which may be an empty one, off an output."""
    carried = dict(output.ec_transfer_params or {})
    parcel = carried.pop(KEY, None)
    if parcel is None:
        return _NOTHING
    output.ec_transfer_params = carried or None
    return Parcel(*parcel)
