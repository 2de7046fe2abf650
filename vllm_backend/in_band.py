"""Saves on their way home with the outputs of their request.

The worker puts cargo on the `ModelRunnerOutput` of a step, the scheduler takes it from there and puts it on the
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


class Cargo(NamedTuple):
    """What one request sends home.

    Attributes:
        streamed: `results.to_bytes` of each value that was streamed, in order.
        reply: what `Outbox.send` made of the `Reply`, if the block has ended.
    """

    streamed: list[bytes]
    reply: bytes | None


class Transit:
    """Cargo in the scheduler, each until its request has an output.

    A reply waits for the last output: a client that asks for the finished output alone would not see the others.
    """

    def __init__(self) -> None:
        self._cargo: dict[str, Cargo] = {}

    def __len__(self) -> int:
        """How many requests have some."""
        return len(self._cargo)

    def add(self, cargo: Mapping[str, Cargo]) -> None:
        """Take in what the worker has sent with a step; a newer reply takes the place of an older one."""
        for request_id, (streamed, reply) in cargo.items():
            before = self._cargo.get(request_id, _NOTHING)
            self._cargo[request_id] = Cargo(before.streamed + streamed, reply or before.reply)

    def attach(self, outputs: Iterable[Any]) -> None:
        """Put cargo on the outputs (`EngineCoreOutput`) of a step."""
        for output in outputs:
            cargo = self._cargo.pop(output.request_id, None)
            if cargo is None:
                continue
            if not output.finished:
                if cargo.reply is not None:
                    self._cargo[output.request_id] = Cargo([], cargo.reply)
                cargo = Cargo(cargo.streamed, None)
            if cargo != _NOTHING:
                output.ec_transfer_params = {**(output.ec_transfer_params or {}), KEY: list(cargo)}

    def keep(self, requests: Collection[str]) -> None:
        """Forget all requests but these."""
        for request_id in self._cargo.keys() - requests:
            del self._cargo[request_id]


_NOTHING = Cargo([], None)


def unpacked(output: RequestOutput) -> Cargo:
    """Take the cargo, which may be an empty one, off an output."""
    carried = dict(output.ec_transfer_params or {})
    cargo = carried.pop(KEY, None)
    if cargo is None:
        return _NOTHING
    output.ec_transfer_params = carried or None
    return Cargo(*cargo)
