"""The engine's own compiled model: it runs all steps but those in which a block waits for a module.

What the blocks read is compared with transformers, as everywhere; which of the two ways a step took is counted in the
engine, which runs in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from invivo import VLLM
from invivo.envoy.errors import PortPassedError
from invivo.vllm_backend.eager import EagerSteps
from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import TINY_ENGINE, runner_of, same, stream, tokens
from support.reference import Edit, Reference, Trace

pytestmark = pytest.mark.engine

PROMPT = [17, 49_000, 2222, 31, 5, 6, 1234, 777, 4000]
STEPS = 6


@dataclass
class Engine:
    """A compiled engine in this process, and how its forwards were run."""

    model: VLLM
    plain: Trace
    compiled: list[bool] = field(default_factory=list)


@pytest.fixture(scope="module")
def _engine() -> Iterator[Engine]:
    path = tiny_checkpoint("llama", tokenizer=smollm2_path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with VLLM(str(path), **TINY_ENGINE) as model:
            engine = Engine(model, Reference(path).run(PROMPT, STEPS))
            runner = runner_of(model)
            forward = runner.model.model.forward  # vLLM's own models call it in a step that is not compiled

            def watched(*args: Any, **kwargs: Any) -> Any:
                engine.compiled[-1] = False
                return forward(*args, **kwargs)

            def execute(*args: Any, **kwargs: Any) -> Any:
                engine.compiled.append(True)
                return model_forward(*args, **kwargs)

            model_forward = runner._model_forward
            runner.model.model.forward, runner._model_forward = watched, execute
            yield engine


@pytest.fixture
def engine(_engine: Engine) -> Iterator[Engine]:
    _engine.compiled.clear()
    yield _engine
    _engine.model.check_integrity()


def _plain(model: VLLM) -> list[int]:
    (output,) = model.generate(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_untraced_requests_run_on_the_compiled_model(engine: Engine) -> None:
    assert _plain(engine.model) == engine.plain.tokens
    assert engine.compiled == [True] * STEPS


def test_a_module_cannot_be_met_after_the_logits_where_no_order_is_known_yet(engine: Engine) -> None:
    """A step on the compiled model tells nothing of the order of the modules. (So this test comes first.)"""
    with pytest.raises(PortPassedError, match=r"the model is at model\.logits"):
        with engine.model.trace(PROMPT, max_tokens=1, temperature=0):
            engine.model.logits
            engine.model.model.layers[0].output


def test_logits_and_samples_leave_the_steps_compiled(engine: Engine) -> None:
    with engine.model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        seen: list[Any] = []
        for _ in tracer.iter[:]:
            seen.append(engine.model.logits)
            engine.model.samples
        seen.save()
    assert engine.compiled == [True] * STEPS
    assert all(same(found, expected.logits) for found, expected in zip(seen, engine.plain.steps, strict=True))


def test_only_the_steps_that_a_block_meets_modules_in_are_eager(engine: Engine) -> None:
    with engine.model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        for _ in tracer.iter[2:4]:
            seen = stream(engine.model.model.layers[1])
        last: Any = engine.model.logits
        last.save(), seen.save()
    assert engine.compiled == [True, True, False, False, True, True]
    assert tokens(tracer) == engine.plain.tokens
    assert same(last[0], engine.plain.steps[3].logits[0])


def test_both_ways_give_the_same_values(engine: Engine) -> None:
    model = engine.model
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        logits: list[Any] = []
        for _ in tracer.iter[:]:
            model.model.layers[0].output
            logits.append(model.logits)
        logits.save()
    assert engine.compiled == [False] * STEPS
    assert tokens(tracer) == engine.plain.tokens == _plain(model)
    assert all(same(found, expected.logits) for found, expected in zip(logits, engine.plain.steps, strict=True))


def test_an_edit_is_felt_in_the_compiled_steps_that_follow(engine: Engine) -> None:
    """The keys and values of the edited prompt are what later, compiled steps attend to."""
    model = engine.model

    def edited(module_in_every_step: bool) -> list[torch.Tensor]:
        with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
            seen: list[Any] = []
            model.model.layers[0].output[0][:] = 0
            seen.append(model.logits)
            for _ in tracer.iter[1:]:
                if module_in_every_step:
                    model.model.layers[2].output
                seen.append(model.logits)
            seen.save()
        return seen

    compiled = edited(module_in_every_step=False)
    assert engine.compiled == [False, *[True] * (STEPS - 1)]
    assert all(same(one, other) for one, other in zip(compiled, edited(module_in_every_step=True), strict=True))
    assert not same(compiled[-1][0], engine.plain.steps[-1].logits[0])


def test_ports_that_are_only_read_are_served_behind_the_forward_until_one_is_edited(engine: Engine) -> None:
    """Beside a block that edits in its fourth step what it has only read before; that forward runs twice."""
    model, half = engine.model, STEPS // 2
    edit = Edit("model.layers.1.mlp", "output", half, lambda rows: rows * 0)
    expected = [engine.plain, Reference(tiny_checkpoint("llama", tokenizer=smollm2_path())).run(PROMPT, STEPS, [edit])]
    hub = runner_of(model).serving.hub
    before = hub.deferred, hub.repeated
    with model.trace(max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        reads: list[Any] = []
        writes: list[Any] = []
        reads.save(), writes.save()
        for edits, seen in ((False, reads), (True, writes)):
            with tracer.invoke(PROMPT):
                for step in tracer.iter[:]:
                    found = [stream(model.model.layers[0])]
                    if edits and step == half:
                        model.model.layers[1].mlp.output[:] = 0
                    else:
                        model.model.layers[1].mlp.output
                    seen.append([*found, *map(stream, model.model.layers[1:]), model.logits])
    again = hub.deferred - before[0], hub.repeated - before[1]
    assert again == (STEPS - 2, 1)  # not in the first step, nor in the one after the edit
    for made, seen, trace in zip(tracer.invokes, (reads, writes), expected, strict=True):
        assert made.result.outputs[0].token_ids == trace.tokens
        for found, there in zip(seen, trace.steps, strict=True):
            layers = [there.output(f"model.layers.{layer}") for layer in range(len(model.model.layers))]
            assert all(same(one, other) for one, other in zip(found, [*layers, there.logits], strict=True))


def test_blocks_that_only_read_have_several_steps_in_one_turn(engine: Engine) -> None:
    """Two requests with their own prompts, for more steps than are kept at once."""
    model, prompts, count = engine.model, (PROMPT, PROMPT[:3]), 40
    reference = Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    hub = runner_of(model).serving.hub
    before = hub.kept, hub.strayed
    with model.trace(max_tokens=count, temperature=0, ignore_eos=True) as tracer:
        with tracer.invoke(prompts[0]):
            first: Any = []
            for _ in tracer.iter[:]:
                first.append([layer.output for layer in model.model.layers])
            first.save()
        with tracer.invoke(prompts[1]):
            second: Any = []
            for _ in tracer.iter[:]:
                second.append([layer.output for layer in model.model.layers])
            second.save()
    assert hub.kept - before[0] > count // 2 and hub.strayed == before[1]
    for made, seen, prompt in zip(tracer.invokes, (first, second), prompts, strict=True):
        expected = reference.run(prompt, count)
        assert made.result.outputs[0].token_ids == expected.tokens
        for found, there in zip(seen, expected.steps, strict=True):
            layers = [there.output(f"model.layers.{layer}") for layer in range(len(model.model.layers))]
            assert all(same(sum(pair), other) for pair, other in zip(found, layers, strict=True))


def test_another_model_beside_it_leaves_the_engine_alone(engine: Engine) -> None:
    """Its module tree is made in this process, where the engine has the process groups that it needs."""
    other = VLLM(str(tiny_checkpoint("llama", tokenizer=smollm2_path())), **TINY_ENGINE)
    assert other.model.layers[1].address == "model.layers.1"
    with engine.model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        engine.model.model.layers[1].output
    assert tokens(tracer) == engine.plain.tokens


def test_layers_run_the_kernels_of_an_eager_engine_in_an_eager_step_only(engine: Engine) -> None:
    runner = runner_of(engine.model)
    norm = runner.model.model.norm
    steps = EagerSteps(runner.model, runner.vllm_config)
    assert cast(Any, norm._forward_method).__name__ == "forward_native"
    kernels = {type(layer).__name__: kernel.__name__ for layer, _, kernel in steps._kernels}
    assert kernels["RMSNorm"] == f"forward_{runner.device.type}"
    assert runner.vllm_config.compilation_config.custom_ops == ["none"]
