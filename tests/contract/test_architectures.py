"""Show 2: on every family, what a block reads and what its edits do equal the transformers reference.

All values are float32, over a prompt and eight decode steps, within 1e-4 relative, by norm and by largest element.
The real deviations are a few 1e-6, so the bound has room for other processors and none for a wrong value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from invivo import VLLM, save
from smollm2 import smollm2_path
from support.checkpoints import FAMILIES, tiny_checkpoint
from support.compare import add, differences, errors, every_edit, find, nudge, tensors, worst, zero
from support.contract import TINY_ENGINE
from support.mapping import Reading, Target, readings, targets
from support.reference import Reference, Trace

pytestmark = pytest.mark.engine

PROMPT = [17, 49_000, 2222, 31, 5, 6, 1234, 777, 4000]
STEPS = 9
BOUND = 1e-4


@dataclass
class Case:
    """One model, in the engine and in transformers.

    Attributes:
        reference: in float32.
        exact: in float64, for the edits of a trained model: those of its first layers make so much of rounding errors
            (6.5e-5 of the logits) that two runs in float32 differ by more.
    """

    family: str
    model: VLLM
    reference: Reference
    plain: Trace
    layers: int
    exact: Reference | None = None

    def readings(self) -> list[Reading]:
        return readings(self.family, self.layers)

    def targets(self) -> list[Target]:
        """All targets of a small model; of a large one those of its first, a middle and its last layer."""
        found = targets(self.family, self.layers)
        if self.layers <= 4:
            return found
        kept = [f".{i}" for i in (0, self.layers // 2, self.layers - 1)]
        return [t for t in found if not any(p.isdigit() for p in t.address.split(".")) or _layer(t) in kept]


def _layer(target: Target) -> str:
    return "." + next(part for part in target.address.split(".") if part.isdigit())


@pytest.fixture(scope="module", params=[*FAMILIES, "smollm2"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """SmolLM2 in the session's engine; the tiny models in engines in this process, which start in seconds."""
    family = str(request.param)
    if family == "smollm2":
        reference = request.getfixturevalue("reference")
        layers = cast(Any, reference.model.config).num_hidden_layers
        exact = Reference(smollm2_path(), torch.float64)
        yield Case("llama", request.getfixturevalue("smollm2"), reference, reference.run(PROMPT, STEPS), layers, exact)
        return
    path = tiny_checkpoint(family, tokenizer=smollm2_path())
    reference = Reference(path)
    layers = cast(Any, reference.model.config).num_hidden_layers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with VLLM(str(path), **TINY_ENGINE, enforce_eager=True) as model:
            yield Case(family, model, reference, reference.run(PROMPT, STEPS), layers)


@pytest.fixture(autouse=True)
def _nothing_left(case: Case) -> Iterator[None]:
    yield
    case.model.check_integrity()


def test_every_port_equals_the_reference(case: Case) -> None:
    model, table = case.model, case.readings()
    ports = list(dict.fromkeys((reading.address, reading.port) for reading in table))
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        seen = save([])
        tokens = save([])
        for _ in tracer.iter[:]:
            seen.append([tensors(getattr(find(model, address), port)) for address, port in ports])
            tokens.append(int(cast(Any, model.samples)[0]))
    assert tokens == case.plain.tokens
    assert len(seen) == STEPS
    wrong = []
    for number, (values, step) in enumerate(zip(seen, case.plain.steps, strict=True)):
        structures = dict(zip(ports, values, strict=True))
        for reading in table:
            found = reading.value(structures[reading.address, reading.port])
            if not errors(found, reading.expected(step)) < BOUND:
                wrong.append(f"step {number}: {reading.name}: {errors(found, reading.expected(step)):.2e}")
    assert not wrong, "\n".join(wrong)


def test_model_logits_equal_the_reference(case: Case) -> None:
    model = case.model
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(cast(torch.Tensor, model.logits))
    for found, step in zip(logits, case.plain.steps, strict=True):
        assert errors(found, step.logits) < BOUND


def edit(envoy: Any, style: str, change: Any) -> None:
    """Make `change` to a module's output in place, as a block does."""
    output = envoy.output
    if style == "tensor":
        change(output)
    elif style == "first":
        change(output[0])
    else:
        hidden, residual = output
        stream = hidden + residual
        change(stream)
        hidden[:] = stream
        residual[:] = 0


def generated(tracer: Any) -> list[int]:
    """The tokens of a finished trace."""
    return list(tracer.result.outputs[0].token_ids)


def edited(case: Case, target: Target, change: Any, at: int | None) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and tokens of a run with an edit at step `at`, or at every step."""
    model, address, style = case.model, target.address, target.style
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        logits = save([])
        for step in tracer.iter[:]:
            if at is None or step == at:
                edit(find(model, address), style, change)
            logits.append(cast(torch.Tensor, model.logits))
    return logits, generated(tracer)


@every_edit
def test_edits_have_the_effect_that_they_have_in_the_reference(case: Case, change: Any, at: int | None) -> None:
    wrong = []
    if case.layers > 4 and change is add:
        change = nudge  # a trained model makes much of large vectors in its first layer, of rounding errors too
    for target in case.targets()[:: 1 if case.layers <= 4 or at is None else 4]:
        expected = (case.exact or case.reference).run(PROMPT, STEPS, [target.edit(at, change)], record=False)
        name = f"{target.address} ({target.quantity})"
        wrong += differences(name, edited(case, target, change, at), expected, BOUND)
        if at is None:
            effect = worst([step.logits for step in expected.steps], case.plain)
            assert effect > (10 if change is nudge else 100) * BOUND, f"the edit of {name} shows nothing"
    assert not wrong, "\n".join(wrong)


def test_an_edit_leaves_the_next_request_alone(case: Case) -> None:
    first = case.targets()[0]
    edited(case, first, zero, None)
    model = case.model
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        pass
    assert generated(tracer) == case.plain.tokens
