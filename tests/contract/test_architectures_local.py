"""Show 2 on the local backend: blocks on transformers models in this process read and do what plain hooks do.

The tree is transformers' own here, so every port has a counterpart in the reference under the same address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from invivo import Local, save
from support.checkpoints import FAMILIES, tiny_checkpoint
from support.compare import differences, errors, every_edit, find, tensors
from support.mapping import targets
from support.reference import Reference, Trace

PROMPT = [17, 49_000, 2222, 31, 5, 6, 1234, 777, 4000]
STEPS = 5
BOUND = 1e-6


@dataclass
class Case:
    """One model with its reference: two copies of the same weights."""

    family: str
    model: Local
    reference: Reference
    plain: Trace


QUICK = ("llama", "mixtral")  # the rest with `make test-all`: the engine's suite has every family


@pytest.fixture(
    scope="module",
    params=[family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
def case(request: pytest.FixtureRequest) -> Case:
    path = tiny_checkpoint(str(request.param))
    reference = Reference(path)
    return Case(str(request.param), Local(Reference(path).model), reference, reference.run(PROMPT, STEPS))


@pytest.fixture(autouse=True)
def _nothing_left(case: Case) -> Iterator[None]:
    yield
    case.model.check_integrity()


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a structure, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value or () for tensor in flat(part)]


def test_every_port_equals_the_reference(case: Case) -> None:
    model = case.model
    # The reference asks for the last row of logits only, the local backend for all; `model.logits` is tested below.
    whole = {"", "lm_head", "model", "transformer"}
    # A module that runs an unknown number of times in a step (an expert's activation) has no one value.
    once = [port for port in case.plain.steps[0].order if port[0] not in whole and "experts." not in port[0]]
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            seen.append([tensors(getattr(find(model, address), port)) for address, port in once])
    assert list(cast(Any, tracer.result).token_ids) == case.plain.tokens
    assert len(seen) == STEPS
    wrong = []
    for number, (values, step) in enumerate(zip(seen, case.plain.steps, strict=True)):
        for (address, port), value in zip(once, values, strict=True):
            expected = flat(step.inputs[address] if port == "inputs" else step.outputs[address])
            found = flat(value)
            assert len(found) == len(expected), (address, port)
            for a, b in zip(found, expected, strict=True):
                if not errors(a.reshape(b.shape), b) < BOUND:
                    wrong.append(f"step {number}: {address}.{port}")
    assert not wrong, "\n".join(wrong)


def edited(case: Case, address: str, change: Any, at: int | None) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and tokens of a run with an edit at step `at`, or at every step."""
    model = case.model
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        logits = save([])
        for step in tracer.iter[:]:
            if at is None or step == at:
                output = find(model, address).output
                change((output[0] if isinstance(output, tuple) else output)[0])
            logits.append(cast(torch.Tensor, model.logits))
    return logits, list(cast(Any, tracer.result).token_ids)


@every_edit
def test_edits_have_the_effect_that_they_have_in_the_reference(case: Case, change: Any, at: int | None) -> None:
    wrong = []
    for target in targets(case.family, 3):
        if ".0" in target.address or ".2" in target.address:  # one layer is enough: the tree treats all alike
            continue
        if target.quantity == "gate":  # transformers' gate has chosen already: its logits go nowhere else
            continue
        plain = replace(target, scaled=False)
        expected = case.reference.run(PROMPT, STEPS, [plain.edit(at, change)], record=False)
        name = f"{target.reference} ({target.quantity})"
        wrong += differences(name, edited(case, target.reference, change, at), expected, BOUND)
    assert not wrong, "\n".join(wrong)
