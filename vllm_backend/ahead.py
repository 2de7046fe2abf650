"""Blocks whose requests run ahead: an engine step is prepared before the tokens of the last one are on the host.

A request whose last token may have ended it (a stop token) must not have the step that was begun for nothing, so the
worker looks at the token before the block has its turn. That waits for the GPU. A block that meets no module need not
have its turn before the forward is launched, so the wait, and the turn itself, come when the GPU has work to do.

Which requests run ahead is the scheduler's to say (`runs_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm import SamplingParams

    from ..tracer.block import Group


def stop_tokens(params: SamplingParams) -> frozenset[int]:
    """Tokens that end a request (`check_stop` in `vllm/v1/core/sched/utils.py`)."""
    found = {*(params.stop_token_ids or ())}
    if params.eos_token_id is not None:
        found.add(params.eos_token_id)
    return frozenset(found)


def runs_ahead(params: SamplingParams, group: Group | None, *, no_module: bool) -> bool:
    """Whether a request whose block runs may be computed before its last token is known.

    Not where the block may come to a barrier, since the request must be held there, nor where other things than a stop
    token and the lengths, which the scheduler knows ahead, may end it. One that a stop token may end has to be waited
    for, which others in the batch shall not feel: only if its block has its turn behind the forward.
    """
    if (group is not None and group.barriers) or params.repetition_detection is not None:
        return False
    return params.structured_outputs is None and (no_module or not stop_tokens(params))


class _Block(NamedTuple):
    """What is known of the block of a request.

    Attributes:
        trace: the trace of several invokes that it belongs to, or None.
        late: it may have its turn behind the forward.
        stops: the tokens that end its request.
    """

    trace: str | None
    late: bool
    stops: frozenset[int]


class Ahead:
    """The blocks of a worker whose engine steps are prepared ahead.

    Args:
        tokens: waits for an output of the runner and gives its tokens by request.
    """

    def __init__(self, tokens: Callable[[object], Mapping[str, int]]) -> None:
        self._tokens = tokens
        self._blocks: dict[str, _Block] = {}
        self._any_late = self._any_stops = False
        self._output: object = None

    def add(self, request: str, group: Group | None, stops: frozenset[int], *, no_module: bool) -> None:
        """A block comes."""
        trace = group.trace if group is not None else None
        late = no_module and (group is None or not group.takes)
        self._blocks[request] = _Block(trace, late, stops)
        self._any_late, self._any_stops = self._any_late or late, self._any_stops or bool(stops)

    def sampled(self, output: object) -> None:
        """The tokens of an engine step are on their way to the host."""
        self._output = output

    def late(self, running: Collection[str], requests: Collection[str]) -> list[str]:
        """Requests of an engine step whose blocks have their turn behind the forward.

        Blocks of one trace keep their order: all of them, or none.

        Args:
            running: those whose blocks run or have run; others are forgotten.
            requests: those of the step.
        """
        if len(self._blocks) > len(running):
            self._blocks = {request: block for request, block in self._blocks.items() if request in running}
            self._output = self._output if self._blocks else None
            self._any_late = any(block.late for block in self._blocks.values())
            self._any_stops = any(block.stops for block in self._blocks.values())
        if not self._any_late:
            return []
        here = [(request, block) for request in requests if (block := self._blocks.get(request)) is not None]
        early = {block.trace for _, block in here if not block.late and block.trace is not None}
        return [request for request, block in here if block.late and block.trace not in early]

    def over(self, requests: Collection[str]) -> list[str]:
        """Those of some requests that their last token has ended; waits for it if there may be any."""
        if self._output is None or not self._any_stops:
            return []
        asked = [(request, stops) for request in requests if (stops := self._stops(request))]
        if not asked:
            return []
        tokens = self._tokens(self._output)
        return [request for request, stops in asked if tokens.get(request) in stops]

    def _stops(self, request: str) -> frozenset[int]:
        block = self._blocks.get(request)
        return block.stops if block is not None else frozenset()
