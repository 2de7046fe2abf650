"""What a model runner must tell, whatever its version: the seam between vLLM and the blocks.

`runner_v1` and `runner_v2` each have the answers of one runner, and a mixin that tells `serving` when a step begins,
has logits, and is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..interleaver.windows import Share

if TYPE_CHECKING:
    from .layers import Met


class NewRequest(NamedTuple):
    """A traced request that enters.

    Attributes:
        request_id: the engine's id of it.
        payload: the encoded `Payload`.
        logprobs: the caller asked for log-probabilities of what is sampled.
        reuses_prefix: what the prefix cache has of the prompt is not computed, and the block does not mind.
        stops: tokens that end the request.
    """

    request_id: str
    payload: bytes
    logprobs: bool
    reuses_prefix: bool
    stops: frozenset[int] = frozenset()


class RunnerAdapter(Protocol):
    """One runner's answers."""

    def new_requests(self, scheduled: Any) -> Sequence[NewRequest]:
        """Traced requests that enter with this engine step."""
        ...

    def finished(self, scheduled: Any) -> AbstractSet[str]:
        """Requests that have left the engine since the last engine step, in whatever way."""
        ...

    def leaving(self, scheduled: Any) -> AbstractSet[str]:
        """Requests that give their key-value blocks back with this engine step: finished or preempted."""
        ...

    def clean(self, request_id: str) -> None:
        """Zero the key-value blocks of a request, before this engine step hands them to another one."""
        ...

    def shares(self, rows: int) -> Mapping[str, Share]:
        """Rows and step of every request of this engine step, once the runner has prepared its inputs."""
        ...

    def follows(self) -> bool:
        """Whether the engine step has the requests of the last one that was asked about here or by `shares`, in the
        same order, each with one row, which is the next one. False if that cannot be told at once."""
        ...

    def longest(self) -> int:
        """The number of positions that a request may have (`max_model_len`)."""
        ...

    def graphs(self) -> bool:
        """Whether steps in which blocks wait for modules may run on graphs, in which no module is called."""
        ...

    def tokens(self, output: Any) -> Mapping[str, int]:
        """The tokens of an engine step by request, of those that got one.

        Args:
            output: what the runner gave for the step, under asynchronous scheduling; its tokens are waited for.
        """
        ...

    def compiled(self) -> bool:
        """Whether forwards run on a compiled model, unless `eagerly`."""
        ...

    def repeatable(self) -> bool:
        """Whether a forward does the same when it is run again: what it leaves behind are keys and values at their
        places, and not a state that it has moved on."""
        ...

    def warm_up(self, forward: Callable[[], object]) -> None:
        """Make ready for steps that run `eagerly`, with a forward of `compiled_kind.ROWS` rows of no request."""
        ...

    def eagerly(self, met: Met) -> AbstractContextManager[None]:
        """A context in which the forward runs module by module, however the model was compiled.

        Args:
            met: whether a block may meet what is inside of the module at an address; where not, it can be one piece.
        """
        ...

    def model(self) -> torch.nn.Module:
        """The loaded model."""
        ...
