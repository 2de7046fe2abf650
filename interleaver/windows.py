"""Which rows of a flat batch belong to whom. No torch here: numbers in, numbers out.

vLLM runs all scheduled tokens as one batch ``[total_tokens, ...]``; each request has a run of consecutive rows. After
the forward, one row per request is left for logits and sampling, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..envoy.errors import PreemptedError, UnsupportedError


class Window(NamedTuple):
    """Rows ``start`` to ``start + length`` of tensors whose row dimension has ``total`` rows."""

    start: int
    length: int
    total: int


class Share(NamedTuple):
    """One request's part of an engine step.

    Attributes:
        rows: its rows in the forward; None if the forward is all its own.
        last: its row among the logits and samples; None if they are all its own.
        step: its generation step, or None if these rows are not exactly one step.
        reason: why `step` is None.
        position: position of its first row among the tokens of the request.
        prompt: number of tokens of its prompt.
    """

    rows: Window | None
    last: Window | None
    step: int | None
    reason: str = ""
    position: int = 0
    prompt: int = 0

    def ends_with(self, step: int) -> bool:
        """Whether the last of its rows is the last row of a step."""
        return self.rows is not None and self.position + self.rows.length == self.prompt + step

    def padded(self, total: int) -> Share:
        """The same rows in tensors of `total` rows."""
        return self if self.rows is None else self._replace(rows=self.rows._replace(total=total))

    def last_of(self, step: int) -> Share:
        """The row of a later step alone, where all before it is computed again."""
        assert self.rows is not None and self.ends_with(step), "the row is there"
        start, length, total = self.rows
        return self._replace(rows=Window(start + length - 1, 1, total), step=step)


def shares(
    request_ids: Sequence[str],
    starts: Sequence[int],
    computed: Sequence[int],
    prompt_lengths: Sequence[int],
    padded: int,
) -> dict[str, Share]:
    """Split an engine step.

    Args:
        request_ids: requests in the order of the batch.
        starts: first row of each request, and the total at the end (``query_start_loc``).
        computed: tokens of each request that earlier forwards have computed.
        prompt_lengths: prompt tokens of each request.
        padded: rows of the tensors, with padding after the last request.
    """
    result, total = {}, len(request_ids)
    rows = zip(request_ids, starts, starts[1:], computed, prompt_lengths, strict=False)
    for index, (request_id, start, end, position, prompt) in enumerate(rows):
        step, reason = step_of(position, end - start, prompt)
        window = _row(start, padded) if end - start == 1 else Window(start, end - start, padded)
        result[request_id] = Share(window, _row(index, total), step, reason, position, prompt)
    return result


@lru_cache(maxsize=4096)
def _row(start: int, total: int) -> Window:
    """One row: the same ones come in step after step."""
    return Window(start, 1, total)


def step_of(computed: int, count: int, prompt_length: int) -> tuple[int | None, str]:
    """The generation step that `count` rows after `computed` tokens are, or None and why they are none.

    Row j is absolute position ``computed + j``; step 0 is the whole prompt, step k the single row at position
    ``prompt_length + k - 1``.
    """
    if computed == 0 and count == prompt_length:
        return 0, ""
    if computed >= prompt_length and count == 1:
        return computed - prompt_length + 1, ""
    if computed < prompt_length and computed + count <= prompt_length:
        return None, (
            f"its prompt of {prompt_length} tokens was split: this engine step has positions {computed} to "
            f"{computed + count - 1}"
        )
    return None, (
        f"{count} tokens from position {computed} on were computed in one go (prompt of {prompt_length} tokens), as "
        "after a preemption"
    )


def due_rows(share: Share, expected: int, *, partial_prompt: bool, edited: bool) -> Share | None:
    """What a block that expects another step than these rows are sees of them; None if all come before that step.

    Args:
        share: the rows.
        expected: the step.
        partial_prompt: step 0 may be the end of the prompt only.
        edited: the block has edited in earlier steps, so these cannot be computed again without it.

    Raises:
        UnsupportedError: the block cannot go on with them.
    """
    if partial_prompt and not expected and share.ends_with(0):
        return share
    if not expected or edited or share.step not in (None, 0):  # else it is after a preemption
        raise _broken(share, expected)
    return share.last_of(expected) if share.ends_with(expected) else None


def _broken(share: Share, expected: int) -> UnsupportedError:
    """Why a block cannot go on with rows that are not the step that it expects."""
    if expected and share.step in (None, 0):
        return PreemptedError(
            f"this trace had to end before step {expected}: memory for keys and values ran out, and the engine threw "
            "this request's away to compute them again later. The block's edits would be missing from them. Give the "
            "engine more memory (`kv_cache_memory_bytes`, `gpu_memory_utilization`) or fewer requests at a time "
            "(`max_num_seqs`)."
        )
    reason = share.reason or f"the engine computed step {share.step} again, where step {expected} was due"
    return UnsupportedError(f"this trace had to end: {reason}. A block sees each step once and whole.")
