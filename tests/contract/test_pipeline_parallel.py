"""A model whose layers two workers have, one after the other: a trace reads and edits as if there were one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import invivo
from contract.test_architectures import (
    PROMPT,
    STEPS,
    Case,
    test_an_edit_leaves_the_next_request_alone,
    test_edits_have_the_effect_that_they_have_in_the_reference,
    test_every_port_equals_the_reference,
)
from invivo import VLLM, PortNotReachedError, PortPassedError, RanksError, TimeLimitError, WriteError, save
from smollm2 import smollm2_path
from support.batch import Batch
from support.busy import crowd, differences, preemptions, run_together
from support.checkpoints import tiny_checkpoint
from support.compare import errors
from support.contract import BOUND, TINY_ENGINE, stream
from support.reference import Edit, Reference

__all__ = [
    "test_an_edit_leaves_the_next_request_alone",
    "test_edits_have_the_effect_that_they_have_in_the_reference",
    "test_every_port_equals_the_reference",
]

pytestmark = pytest.mark.engine

SPLIT = {"pp2": {"pipeline_parallel_size": 2}, "tp2pp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}}


@pytest.fixture(scope="module", params=["pp2", pytest.param("tp2pp2", marks=pytest.mark.slow)])
def llama(request: pytest.FixtureRequest) -> Iterator[VLLM]:
    """The tiny Llama: two layers in the first stage, one in the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_PP_LAYER_PARTITION", "2,1")
        path = tiny_checkpoint("llama", tokenizer=smollm2_path())
        limits = {"time_limit": 1.5, "max_num_seqs": 32, "max_model_len": 448}
        limits |= {"block_size": 32, "num_gpu_blocks_override": 15}
        with VLLM(str(path), enforce_eager=True, **{**TINY_ENGINE, **limits, **SPLIT[request.param]}) as model:
            yield model


@pytest.fixture(scope="module")
def case(llama: VLLM) -> Case:
    reference = Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    return Case("llama", llama, reference, reference.run(PROMPT, STEPS), 3)


@pytest.fixture(autouse=True)
def _nothing_left(llama: VLLM) -> Iterator[None]:
    yield
    llama.check_integrity()


def test_reads_in_all_stages_over_eight_steps_and_saves_in_order(llama: VLLM, case: Case) -> None:
    with llama.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        seen = list().save()
        for step in tracer.iter[:]:
            seen.append((step, 0, stream(llama.model.layers[0])))
            seen.append((step, 2, stream(llama.model.layers[2])))
            seen.append((step, "token", int(cast(Any, llama.samples)[0])))
    assert [entry[:2] for entry in seen] == [(step, what) for step in range(STEPS) for what in (0, 2, "token")]
    for step, what, value in seen:
        if what == "token":
            assert value == case.plain.tokens[step]
        elif what == 0:  # the last layer of transformers is behind the norm
            assert errors(value, case.plain.steps[step].output("model.layers.0")) < BOUND


def test_an_edit_from_a_value_of_the_same_stage(llama: VLLM, case: Case) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        value = llama.model.layers[0].mlp.output.clone()
        llama.model.layers[1].mlp.output[:] = 2 * value
        logits = llama.logits.save()

    kept: list[torch.Tensor] = []

    def keep(rows: torch.Tensor) -> None:
        kept.append(rows.clone())

    def put(rows: torch.Tensor) -> None:
        rows[:] = 2 * kept[0]

    edits = [
        Edit("model.layers.0.mlp", "output", None, keep),
        Edit("model.layers.1.mlp", "output", None, put),
    ]
    assert errors(logits, case.reference.run(PROMPT, 1, edits).steps[0].logits) < BOUND


def test_patching_from_an_early_to_a_late_layer(llama: VLLM, case: Case) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        value = llama.model.layers[0].mlp.output
        llama.model.layers[2].mlp.output[:] = value
        logits = llama.logits.save()
    kept: list[torch.Tensor] = []

    def keep(rows: torch.Tensor) -> None:
        kept.append(rows.clone())

    def put(rows: torch.Tensor) -> None:
        rows[:] = kept[0]

    edits = [
        Edit("model.layers.0.mlp", "output", None, keep),
        Edit("model.layers.2.mlp", "output", None, put),
    ]
    assert errors(logits, case.reference.run(PROMPT, 1, edits).steps[0].logits) < BOUND


def test_the_wrong_direction_is_refused(llama: VLLM) -> None:
    with pytest.raises(PortPassedError, match=r"model\.layers\.0\.mlp\.output has passed"):
        with llama.trace(PROMPT, max_tokens=1):
            late = llama.model.layers[2].mlp.output
            llama.model.layers[0].mlp.output[:] = late


def test_a_late_value_reaches_an_early_layer_in_the_next_step(llama: VLLM) -> None:
    """What the last stage computed in one step decides what the first one does in the next."""
    runs = []
    for scale in (0.0, 1.0):
        with llama.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
            logits = list().save()
            late = None
            for step in tracer.iter[:]:
                if late is not None:
                    llama.model.layers[0].output[0][-1] += scale * late[-1]
                late = llama.model.layers[2].mlp.output
                logits.append(llama.logits)
        runs.append(logits)
    assert errors(runs[1][0], runs[0][0]) < BOUND < errors(runs[1][1], runs[0][1])


def test_a_token_decides_what_the_first_stage_does(llama: VLLM, case: Case) -> None:
    with llama.trace(PROMPT, max_tokens=8, temperature=0, ignore_eos=True) as tracer:
        ids = list().save()
        for _ in tracer.iter[:]:
            llama.model.layers[0].output
            ids.append(int(cast(Any, llama.samples)[0]))
            if len(ids) == 3:
                tracer.stop()
    assert ids == case.plain.tokens[:3] and len(tracer.result.outputs[0].token_ids) == 3


def test_modules_of_later_stages_can_be_called_behind_the_last_port(llama: VLLM) -> None:
    with llama.trace(PROMPT, max_tokens=2, temperature=0, ignore_eos=True) as tracer:
        lenses = list().save()
        for _ in tracer.iter[:]:
            streams = [stream(layer)[-1:] for layer in llama.model.layers]
            lenses.append([llama.lm_head(llama.model.norm(one)) for one in streams])
            lenses[-1].append(llama.logits)
    for lens in lenses:
        assert errors(lens[2], lens[3]) < BOUND < errors(lens[0], lens[3])


def test_an_error_in_each_stage(llama: VLLM) -> None:
    for at in (0, 2):
        batch = Batch(llama)
        with batch.traced(PROMPT, max_tokens=3, ignore_eos=True):
            value = save(llama.model.layers[at].mlp.output)
            raise KeyError("mine")
        batch.plain({"prompt_token_ids": PROMPT}, max_tokens=3, ignore_eos=True)
        wrong, plain = batch.run()
        assert type(wrong.error) is KeyError and wrong.saves["value"].shape == (9, 128)
        assert len(wrong.tokens) == 1 and len(plain.tokens) == 3


def test_limits_in_each_stage(llama: VLLM) -> None:
    for at in (0, 2):
        with pytest.raises(TimeLimitError):
            with llama.trace(PROMPT, max_tokens=2):
                llama.model.layers[at].mlp.output
                while True:
                    pass


def test_a_module_that_is_never_called(llama: VLLM) -> None:
    with pytest.raises(PortNotReachedError, match="was not called"):
        with llama.trace(PROMPT, max_tokens=1):
            llama.model.output


def stage() -> int:
    from vllm.distributed import get_pp_group

    return int(get_pp_group().rank_in_group)


def test_a_block_that_differs_between_stages(llama: VLLM) -> None:
    with pytest.raises(RanksError, match="at the same place in stage 0"):
        with llama.trace(PROMPT, max_tokens=1):
            if stage() == 0:
                llama.model.layers[0].mlp.output
            else:
                llama.model.layers[1].mlp.output
            llama.logits


def test_what_a_block_writes_must_be_the_same_in_all_stages(llama: VLLM) -> None:
    with pytest.raises(RanksError, match=r"wrote at model\.layers\.0\.mlp\.output in stage 0"):
        with llama.trace(PROMPT, max_tokens=1):
            llama.model.layers[0].mlp.output[0] += stage()
            seen = llama.model.layers[2].output[0].save()


@pytest.mark.parametrize("at", [0, 1])
def test_an_error_in_one_stage_only(llama: VLLM, at: int) -> None:
    batch = Batch(llama)
    with batch.traced(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            llama.model.layers[0].output
            if stage() == at:
                raise KeyError("mine")
            llama.model.layers[2].output
    batch.plain({"prompt_token_ids": PROMPT}, max_tokens=3, ignore_eos=True)
    wrong, plain = batch.run()
    assert type(wrong.error) is KeyError and wrong.error.args == ("mine",)
    assert len(wrong.tokens) == 1 and len(plain.tokens) == 3


def test_a_stop_in_the_first_stage(llama: VLLM, case: Case) -> None:
    with llama.trace(PROMPT, max_tokens=8, temperature=0, ignore_eos=True) as tracer:
        seen = list().save()
        for step in tracer.iter[:]:
            seen.append(stream(llama.model.layers[0]))
            if step == 2:
                tracer.stop()
    assert len(seen) == 3 and tracer.result.outputs[0].token_ids == case.plain.tokens[:3]
    for found, step in zip(seen, case.plain.steps, strict=False):
        assert errors(found, step.output("model.layers.0")) < BOUND


def test_a_change_after_a_call_of_a_later_module_is_refused(llama: VLLM) -> None:
    with pytest.raises(RanksError, match="change the value before that call"):
        with llama.trace(PROMPT, max_tokens=1):
            hidden = llama.model.layers[0].output[0]
            lens = llama.lm_head(hidden[-1:]).save()
            hidden[-1] *= 2


def test_a_value_of_an_invoke_without_a_loop_is_handed_on(llama: VLLM) -> None:
    """Its block has ended in the last stage when the first one hears of the value."""
    with llama.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT):
            late = llama.model.layers[2].mlp.output
            plain = llama.logits.save()
        with tracer.invoke(PROMPT):
            llama.model.layers[0].mlp.output[:] = late
            patched = llama.logits.save()
    assert errors(patched, plain) > BOUND


def test_a_harvest(llama: VLLM, case: Case, tmp_path: Path) -> None:
    prompts = [[17, 49_000, 2222], [6], [1234, 777, 4000, 8, 15]]
    ports = ["sum(model.layers.0.output)", "model.layers.2.mlp.act_fn.output"]
    rows = invivo.harvest(llama, prompts, ports, tmp_path, progress=False)
    assert len(rows) == 9
    for number, prompt in enumerate(prompts):
        step = case.reference.run(prompt, 1).steps[0]
        found = rows.of_prompt(number)
        assert errors(found[ports[0]], step.output("model.layers.0")) < BOUND
        assert errors(found[ports[1]], step.input("model.layers.2.mlp.down_proj")) < BOUND


def test_random_numbers_are_the_same_in_all_stages(llama: VLLM) -> None:
    runs = []
    for _ in range(2):
        with llama.trace(PROMPT, max_tokens=1, seed=7):
            llama.model.layers[0].mlp.output += torch.randn(len(PROMPT), 128)
            second = torch.randn(3).save()
            llama.model.layers[2].mlp.output += torch.randn(len(PROMPT), 128)
            logits = llama.logits.save()
        runs.append((second, logits))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


def test_the_tree_shows_all_layers(llama: VLLM) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        llama.model.layers[0].output
        llama.model.layers[2].output
    shown = str(llama)
    assert "PPMissingLayer" not in shown and "QKVParallelLinear -> ([n, 256], NoneType)" in shown
    assert "VocabParallelEmbedding -> [n, 128]" in shown and "LogitsProcessor -> [1, 49152]" in shown


def test_invokes_hand_values_over_and_meet(llama: VLLM) -> None:
    with llama.trace(max_tokens=2, temperature=0, ignore_eos=True) as tracer:
        shapes = list().save()
        with tracer.invoke(PROMPT):
            for _ in tracer.iter[:]:
                late = llama.model.layers[2].mlp.output
        with tracer.invoke(PROMPT):
            llama.model.layers[0].mlp.output[-1] = late[-1]
            shapes.append(list(late.shape))
            patched = llama.logits.save()
    assert shapes == [[1, 128]] and patched.shape == (1, 49_152)
    with llama.trace(max_tokens=1, temperature=0) as tracer:
        barrier = tracer.barrier(2)
        box = {}
        with tracer.invoke(PROMPT):
            box["value"] = llama.model.layers[0].mlp.output
            plain = llama.logits.save()
            barrier()
        with tracer.invoke(PROMPT):
            barrier()
            llama.model.layers[2].mlp.output[:] = box["value"]
            patched = llama.logits.save()
    assert errors(patched, plain) > BOUND


def test_blocks_that_share_an_object_have_their_turns_in_the_order_of_one_worker(llama: VLLM) -> None:
    """Also in the stage that is told what the other has read, and where one of them ends before the others."""
    with llama.trace(temperature=0, ignore_eos=True) as tracer:
        order, box = list().save(), {}
        with tracer.invoke(PROMPT, max_tokens=3):
            for step in tracer.iter[:]:
                middle = llama.model.layers[1].mlp.output
                middle[-1] = box["early"][-1]
                order.append(("first", step, 1))
                box["late", step] = llama.model.layers[2].mlp.output
                order.append(("first", step, 2))
        with tracer.invoke(PROMPT, max_tokens=4):
            for step in tracer.iter[:]:
                box["early"] = llama.model.layers[0].mlp.output * len(order)
                if step == 3:
                    llama.model.layers[0].mlp.output[-1] = box["late", 2][-1]
                order.append(("second", step, 0))
                llama.model.layers[1].mlp.output
                order.append(("second", step, 1))
                llama.logits
    turns = [("second", 0), ("first", 1), ("second", 1), ("first", 2)]
    expected = [(name, step, at) for step in range(3) for name, at in turns]
    assert order == [*expected, ("second", 3, 0), ("second", 3, 1)]


def test_what_a_block_is_refused_and_catches_does_not_end_it(llama: VLLM) -> None:
    with llama.trace(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[:]:
            llama.model.layers[2].mlp.output
            for ask in (lambda: llama.model.layers[0].output, lambda: llama.lm_head(torch.zeros(2, 3))):
                try:
                    ask()
                except (PortPassedError, RuntimeError) as error:
                    seen.append(type(error).__name__)
            with suppress(PortNotReachedError):
                llama.model.output
    assert seen == ["PortPassedError", "RuntimeError"] * 3


def test_sixty_requests_together(llama: VLLM) -> None:
    """The mixed load of `test_busy_engine.py`, with so little memory that requests are preempted."""
    requests = crowd(5, 60, traced=0.5, longest=100, budget=448)
    scheduler: Any = cast(Any, llama.engine).llm_engine.engine_core.engine_core.scheduler
    with pytest.MonkeyPatch.context() as patch:
        preempted = preemptions(scheduler, patch)
        found = run_together(llama, requests)
    assert preempted
    expected = [request.alone(llama) for request in requests[::3]]
    triples = zip(requests[::3], found[::3], expected, strict=True)
    wrong = [text for triple in triples for text in differences(*triple)]
    assert not wrong, "\n".join(wrong)


def test_token_ids_are_bounded_by_the_vocabulary_in_all_stages(llama: VLLM, case: Case) -> None:
    """Only the first stage has the table, and a later one must not take the ids for positions."""
    other = [PROMPT[0], 40_000, *PROMPT[2:]]
    with llama.trace(PROMPT, max_tokens=1, temperature=0):
        llama.model.embed_tokens.input[1] = 40_000
        found = llama.model.layers[2].output[0].save()
        logits = llama.logits.save()
    with llama.trace(other, max_tokens=1, temperature=0):
        expected = llama.logits.save()
    assert errors(logits, expected) < BOUND
    with pytest.raises(WriteError, match="has put 5 to 1000000 there"):
        with llama.trace(PROMPT, max_tokens=1, temperature=0):
            llama.model.embed_tokens.input[1] = 10**6
            llama.logits


def test_large_saves_come_home_once(llama: VLLM) -> None:
    with llama.trace(PROMPT * 20, max_tokens=1):
        early = llama.model.layers[0].mlp.output.save()
        large = torch.ones(1 << 20).save()
        late = llama.model.layers[2].mlp.output.save()
    assert int(large.sum()) == 1 << 20 and early.shape == late.shape == (180, 128)
