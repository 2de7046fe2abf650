"""A crowd of traced and plain requests with every kind of block, drawn from a seed, and what each gives alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from invivo import PreemptedError, PromptError, save
from support.batch import Batch, Member
from support.compare import tensors
from support.contract import BOUND, error_of

VOCABULARY = 49_152


def read(model: Any, trace: Any, at: int) -> None:
    """Read a layer and the logits in every step."""
    with trace as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            seen.append(model.model.layers[1].output)
            seen.append(model.logits)


def edit(model: Any, trace: Any, at: int) -> None:
    """Edit a layer in every step, and read a later one."""
    with trace as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            model.model.layers[0].output[0][-1] += 0.5
            seen.append(model.model.layers[2].output)


def once(model: Any, trace: Any, at: int) -> None:
    """Edit the first position of the prompt, and nothing later."""
    with trace:
        value = model.model.layers[1].mlp.output
        value[0] *= 2
        seen = save([model.model.norm.output])
        seen.append(value)


def stop(model: Any, trace: Any, at: int) -> None:
    """End the request early."""
    with trace as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            seen.append(model.logits)
            if step == at:
                tracer.stop()


def fail(model: Any, trace: Any, at: int) -> None:
    """Raise an error."""
    with trace as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            seen.append(model.logits)
            if step == at:
                raise KeyError(step)


BLOCKS: tuple[Callable[[Any, Any, int], None], ...] = (read, edit, once, stop, fail)


@dataclass(frozen=True)
class One:
    """One request of a crowd; `block` is None for a plain one.

    Attributes:
        refused: numbers of tokens with which it was tried first; a trace of so many is refused where it is made.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    block: Callable[[Any, Any, int], None] | None
    at: int
    refused: tuple[int, ...] = ()

    def add(self, batch: Batch, model: Any) -> None:
        """Put it into a batch."""
        sampling = {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        if self.block is None:
            batch.plain({"prompt_token_ids": list(self.prompt)}, **sampling)
        else:
            for length in self.refused:
                with pytest.raises(PromptError, match=f"{length} tokens, and the engine computes at most "):
                    model.trace([1] * length, **sampling)
            self.block(model, batch.traced(list(self.prompt), **sampling), self.at)

    def alone(self, model: Any) -> Member:
        """What it gives on an idle engine."""
        batch = Batch(model)
        self.add(batch, model)
        return batch.run()[0]


def crowd(seed: int, count: int, *, traced: float, longest: int, budget: int) -> list[One]:
    """Requests with prompts of 1 to `longest` tokens.

    Traced ones are drawn with as long prompts as the others, and again when that is refused: over `budget` tokens.
    """
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        block = draw.choice(BLOCKS) if draw.random() < traced else None
        lengths = [draw.randint(1, longest)]
        while block is not None and lengths[-1] > budget:
            lengths.append(draw.randint(1, longest))
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(lengths[-1]))
        found.append(One(prompt, draw.randint(1, 24), block, draw.randint(0, 8), tuple(lengths[:-1])))
    return found


def run_together(model: Any, requests: list[One]) -> list[Member]:
    """All of them at once."""
    batch = Batch(model)
    for request in requests:
        request.add(batch, model)
    return batch.run()


def preemptions(scheduler: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """The requests that a scheduler preempts from now on."""
    found: list[str] = []
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> None:
        found.append(request.request_id)
        preempt(request, *args, **kwargs)

    patch.setattr(scheduler, "_preempt_request", noted)
    return found


def values_of(member: Member) -> list[torch.Tensor]:
    """All tensors that its block saved, in order."""
    return [tensor for value in member.saves.get("seen", []) for tensor in tensors(value)]


def differences(request: One, found: Member, expected: Member) -> list[str]:
    """In what a run in a crowd differs from the run alone; one that was refused after a preemption does not."""
    if isinstance(found.error, PreemptedError):
        return [] if request.block in (edit, once) else ["a block without edits was refused"]
    wrong = []
    if type(found.error) is not type(expected.error):
        wrong.append(f"error {found.error!r}, alone {expected.error!r}")
    if found.tokens != expected.tokens:
        wrong.append(f"tokens {found.tokens}, alone {expected.tokens}")
    values, alone = values_of(found), values_of(expected)
    if len(values) != len(alone):
        wrong.append(f"{len(values)} values, alone {len(alone)}")
    error = max((error_of(one, other) for one, other in zip(values, alone, strict=False)), default=0.0)
    if not error < BOUND:
        wrong.append(f"values differ by {error:.1e}")
    name = request.block.__name__ if request.block else "plain"
    return [f"{name}, {len(request.prompt)} + {request.max_tokens} tokens: {text}" for text in wrong]
