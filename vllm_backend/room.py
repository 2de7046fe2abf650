"""Making room for a prompt that must be computed whole. No vLLM here: numbers in, names out.

vLLM gives the tokens of an engine step to running requests first and cuts what waits to what is left. A traced prompt
must not be cut. If it does not fit into what is left, it waits a step, and in the next one those are left out whose
tokens would take its place: prompts that are computed in chunks anyway, and decoding requests only if there is no other
way. Nobody is left out in two steps in a row.
"""

from __future__ import annotations

from collections.abc import Iterable


def left_out(prompt: int, budget: int, running: Iterable[tuple[str, int]]) -> set[str]:
    """Requests to leave out of an engine step, so that a prompt fits into it.

    Args:
        prompt: number of tokens of the prompt, at most `budget`.
        budget: number of tokens of an engine step.
        running: the running requests in order, each with the number of tokens that it could take: 1 for one that
            decodes, the rest of its prompt for one that is computed in chunks.

    Returns:
        As few decoding requests as possible, the last ones first, and all the others if anything has to go.
    """
    running = list(running)
    if prompt + sum(tokens for _, tokens in running) <= budget:
        return set()
    chunked = {request for request, tokens in running if tokens > 1}
    decoding = [request for request, tokens in running if tokens <= 1]
    return chunked | set(decoding[max(budget - prompt, 0) :])
