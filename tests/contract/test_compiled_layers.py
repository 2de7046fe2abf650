"""In an engine that compiles, layers in which nobody is met stay compiled in the steps that meet modules.

On every family, what blocks read and edit at the edges of layers is compared with transformers, in float32. Whether a
layer ran compiled is told by its first module, which is called only if it did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from invivo import VLLM, save
from invivo.vllm_backend.layers import layers_of
from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.compare import add, errors, find, tensors, vector
from support.contract import TINY_ENGINE, runner_of, stream
from support.mapping import FAMILIES, readings
from support.reference import Edit, Reference, Trace

pytestmark = pytest.mark.engine

PROMPT = [17, 49_000, 2222, 31, 5, 6, 1234, 777, 4000]
STEPS = 5
BOUND = 1e-4


@dataclass
class Case:
    """One compiled engine in this process; `ran` counts the calls of each layer that were not compiled."""

    family: str
    model: VLLM
    reference: Reference
    plain: Trace
    layers: list[str]
    ran: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        modules = dict(runner_of(self.model).model.named_modules())
        for address in self.layers:
            first = next(child for child in modules[address].children() if not isinstance(child, torch.nn.ModuleList))
            first.forward = self._counting(address, first.forward)

    def _counting(self, address: str, forward: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.ran[address] += 1
            return forward(*args, **kwargs)

        return counting

    def layer(self, number: int) -> Any:
        return find(self.model, self.layers[number])


_SLOW = ("qwen2", "qwen3")
"""To vLLM their layers are those of Llama, but for biases and norms of heads."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=pytest.mark.slow if family in _SLOW else ()) for family in FAMILIES],
)
def _case(request: pytest.FixtureRequest) -> Iterator[Case]:
    family = str(request.param)
    path = tiny_checkpoint(family, tokenizer=smollm2_path())
    reference = Reference(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with VLLM(str(path), **TINY_ENGINE) as model:
            model.dispatch()
            layers = runner_of(model).serving._adapter._eager.layers
            loaded = runner_of(model).get_model()
            case = Case(family, model, reference, reference.run(PROMPT, STEPS), [*layers_of(loaded, [loaded])])
            assert len(layers) == len(case.layers) == 3, layers._failed
            with model.trace(PROMPT, max_tokens=1):  # after this one, the order of the modules is known
                case.layer(0).output
            yield case


@pytest.fixture
def case(_case: Case) -> Iterator[Case]:
    _case.ran.clear()
    runner_of(_case.model).serving.hub._asked.clear()  # what a test before asked for is looked out for, for a while
    yield _case
    _case.model.check_integrity()


def test_what_is_read_at_the_edges_of_compiled_layers_equals_the_reference(case: Case) -> None:
    model = case.model
    table = [reading for reading in readings(case.family, len(case.layers)) if reading.address in case.layers]
    ports = list(dict.fromkeys((reading.address, reading.port) for reading in table))
    assert {address for address, _ in ports} == {*case.layers}
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        seen, tokens = save([]), save([])
        for _ in tracer.iter[:]:
            seen.append([tensors(getattr(find(model, address), port)) for address, port in ports])
            tokens.append(int(model.samples[0]))
    assert tokens == case.plain.tokens
    assert not case.ran
    for values, step in zip(seen, case.plain.steps, strict=True):
        structures = dict(zip(ports, values, strict=True))
        for reading in table:
            found = reading.value(structures[reading.address, reading.port])
            assert errors(found, reading.expected(step)) < BOUND, reading.name


def test_edits_at_the_edges_of_compiled_layers_do_what_they_do_in_the_reference(case: Case) -> None:
    model, edge = case.model, case.layers[1]
    expected = case.reference.run(PROMPT, STEPS, [Edit(edge, "output", number, add) for number in range(STEPS)])
    assert expected.tokens != case.plain.tokens
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        after, logits = save([]), save([])
        for _ in tracer.iter[:]:
            output = case.layer(1).output
            rows = output[0] if isinstance(output, tuple) else output
            rows += vector(rows)
            after.append(stream(case.layer(2)))
            logits.append(model.logits)
    assert not case.ran
    assert tracer.result.outputs[0].token_ids == expected.tokens
    for found, last, step in zip(after, logits, expected.steps, strict=True):
        assert errors(found, step.output(case.layers[2])) < BOUND
        assert errors(last, step.logits) < BOUND


def test_only_the_layer_that_a_block_goes_into_runs_module_by_module(case: Case) -> None:
    """The block asks for what is inside when the layer before is over."""
    model = case.model
    inside = next(
        reading
        for reading in readings(case.family, len(case.layers))
        if reading.address.startswith(f"{case.layers[2]}.") and reading.quantity == "MLP"
    )
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            before = stream(case.layer(1))
            seen.append((before, tensors(getattr(find(model, inside.address), inside.port)), model.logits))
    assert case.ran == {case.layers[2]: STEPS}
    for (before, value, logits), step in zip(seen, case.plain.steps, strict=True):
        assert errors(before, step.output(case.layers[1])) < BOUND
        assert errors(inside.value(value), inside.expected(step)) < BOUND
        assert errors(logits, step.logits) < BOUND


def test_requests_of_several_lengths_share_a_step_of_compiled_layers(case: Case) -> None:
    """One of them has a single token."""
    model, prompts = case.model, ([4000], PROMPT[:3])
    with model.trace(max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        with tracer.invoke(prompts[0]):
            one = save([])
            for _ in tracer.iter[:]:
                one.append(stream(case.layer(1)))
        with tracer.invoke(prompts[1]):
            three = save([])
            for _ in tracer.iter[:]:
                three.append(stream(case.layer(1)))
    for made, prompt, seen in zip(tracer.invokes, prompts, (one, three), strict=True):
        expected = case.reference.run(prompt, STEPS)
        assert made.result.outputs[0].token_ids == expected.tokens
        assert all(errors(x, y.output(case.layers[1])) < BOUND for x, y in zip(seen, expected.steps, strict=True))
    assert not case.ran


def test_a_batch_of_one_row_runs_compiled(case: Case) -> None:
    model, expected = case.model, case.reference.run([4000], STEPS)
    with model.trace([4000], max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            seen.append(stream(case.layer(1)))
    assert tracer.result.outputs[0].token_ids == expected.tokens
    assert all(errors(x, y.output(case.layers[1])) < BOUND for x, y in zip(seen, expected.steps, strict=True))
    assert not case.ran


def test_a_block_that_runs_a_part_of_a_layer_has_it_run_as_ever(case: Case) -> None:
    model = case.model
    layer = runner_of(model).model.get_submodule(case.layers[2])
    name = next(name for name, _ in layer.named_children() if "norm" in name or "ln" in name)
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        rows = stream(case.layer(1))
        value = find(model, f"{case.layers[2]}.{name}")(rows).save()
        rows.save()
    with torch.inference_mode():
        assert errors(value, layer.get_submodule(name)(rows.clone())) < BOUND
