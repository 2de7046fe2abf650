"""A model that two workers share: what is read is whole, what is written reaches both, and they stay together.

The values of every port are those of the reference, which knows nothing of ranks; so do the edits' effects.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import invivo
from contract.test_architectures import (
    PROMPT,
    STEPS,
    Case,
    test_edits_have_the_effect_that_they_have_in_the_reference,
    test_every_port_equals_the_reference,
)
from invivo import VLLM, InvokeError, RanksError, TimeLimitError, UnsupportedError, save
from smollm2 import smollm2_path
from support.batch import Batch
from support.busy import crowd, differences, preemptions, run_together
from support.checkpoints import tiny_checkpoint
from support.compare import errors
from support.contract import BOUND, TINY_ENGINE, first, stream
from support.reference import Edit, Reference

__all__ = ["test_edits_have_the_effect_that_they_have_in_the_reference", "test_every_port_equals_the_reference"]

pytestmark = pytest.mark.engine

OTHERS = ("mixtral", "llama with one key-value head", "qwen3", "gpt2", "qwen2", "gemma")


def split_model(family: str, patch: pytest.MonkeyPatch, **arguments: Any) -> VLLM:
    """A tiny model whose engine runs in this process, and its two workers in others."""
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    patch.setenv("OMP_NUM_THREADS", "1")
    path = tiny_checkpoint(family, tokenizer=smollm2_path())
    return VLLM(str(path), tensor_parallel_size=2, enforce_eager=True, **{**TINY_ENGINE, **arguments})


@pytest.fixture(scope="module", params=["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    family = str(request.param)
    reference = Reference(tiny_checkpoint(family, tokenizer=smollm2_path()))
    if family == "llama":
        yield Case(family, request.getfixturevalue("llama"), reference, reference.run(PROMPT, STEPS), 3)
        return
    with pytest.MonkeyPatch.context() as patch, split_model(family, patch) as model:
        yield Case(family.split()[0], model, reference, reference.run(PROMPT, STEPS), 3)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"case", "llama"} & set(request.fixturenames):
        used = request.getfixturevalue(name)
        (used.model if isinstance(used, Case) else used).check_integrity()


@pytest.fixture(scope="module")
def llama() -> Iterator[VLLM]:
    """The tiny Llama, with short limits and room for many requests."""
    with pytest.MonkeyPatch.context() as patch:
        room = {"max_num_seqs": 32, "max_model_len": 448, "block_size": 32, "num_gpu_blocks_override": 15}
        with split_model("llama", patch, time_limit=1.5, **room) as model:
            yield model


def test_f3_tokens_and_values_are_those_of_one_worker(case: Case) -> None:
    """Field report F3; the reference is one worker."""
    model = case.model
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(cast(torch.Tensor, model.logits))
    assert tracer.result.outputs[0].token_ids == case.plain.tokens
    assert all(errors(found, step.logits) < BOUND for found, step in zip(logits, case.plain.steps, strict=True))


def test_f19_merged_layers_have_the_columns_of_one_worker(llama: VLLM) -> None:
    """Field report F19: queries, keys and values, and the halves of the MLP, are not interleaved by rank."""
    reference = Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    step = reference.run(PROMPT, 1).steps[0]
    with llama.trace(PROMPT, max_tokens=1):
        attention = llama.model.layers[1].self_attn
        merged = attention.qkv_proj.output[0].save()
        halves = llama.model.layers[1].mlp.gate_up_proj.output[0].save()
    expected = [step.output(f"model.layers.1.self_attn.{name}_proj") for name in "qkv"]
    assert errors(merged, torch.cat(expected, -1)) < BOUND
    expected = [step.output(f"model.layers.1.mlp.{name}_proj") for name in ("gate", "up")]
    assert errors(halves, torch.cat(expected, -1)) < BOUND


def test_a_head_has_its_number(llama: VLLM) -> None:
    """One of four heads, two to a rank, is put to zero: as in the reference."""
    reference = Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    found, expected = [], []
    for head in range(4):
        with llama.trace(PROMPT, max_tokens=1):
            llama.model.layers[1].self_attn.o_proj.input[:, 32 * head : 32 * (head + 1)] = 0
            found.append(llama.logits)
            found = found.save()

        def zero(rows: torch.Tensor, head: int = head) -> None:
            rows[:, 32 * head : 32 * (head + 1)] = 0

        edit = Edit("model.layers.1.self_attn.o_proj", "input", None, zero)
        expected.append(reference.run(PROMPT, 1, [edit]).steps[0].logits)
    assert len({float(one.sum()) for one in found}) == 4
    assert all(errors(one, other) < BOUND for one, other in zip(found, expected, strict=True))


def test_the_tree_shows_the_whole_model(llama: VLLM) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        value = llama.model.layers[0].output[0].save()
    shown = str(llama)
    assert "QKVParallelLinear -> ([n, 256], NoneType)" in shown
    assert "MergedColumnParallelLinear -> ([n, 384], NoneType)" in shown
    assert "SiluAndMul -> [n, 192]" in shown and "LogitsProcessor -> [1, 49152]" in shown


def test_modules_that_a_block_calls_give_the_whole(llama: VLLM) -> None:
    """At a port whose value is edited before and after the call."""
    with llama.trace(PROMPT, max_tokens=1):
        inside = llama.model.layers[1].mlp
        given = inside.gate_up_proj.input.save()
        merged = inside.gate_up_proj.output[0].save()
        again = inside.gate_up_proj(given)[0].save()
        gated = inside.act_fn(merged).save()
        down = inside.down_proj(gated)[0].save()
        output = inside.output.save()
        whole = inside(given).save()
        hidden = llama.model.norm.output[0]
        hidden[-1] *= 2
        lens = llama.lm_head(hidden[-1:]).save()
        hidden[-1] *= 2
        twice = llama.lm_head(hidden[-1:]).save()
        logits = llama.logits.save()
    for one, other in ((again, merged), (down, output), (whole, output), (twice, 2 * lens), (logits, twice)):
        assert errors(one, other) < BOUND


def test_random_numbers_are_the_same_on_all_ranks(llama: VLLM) -> None:
    """Noise that is written to a whole value, and to a split one, twice: what comes out is the same."""
    runs = []
    for _ in range(2):
        with llama.trace(PROMPT, max_tokens=1, seed=5):
            layer = llama.model.layers[1]
            layer.mlp.act_fn.output += torch.randn(len(PROMPT), 192)
            layer.output[0][:] += torch.randn(len(PROMPT), 128)
            logits = llama.logits.save()
        runs.append(logits)
    assert torch.equal(*runs)


def test_sets_have_the_same_order_on_all_ranks(llama: VLLM) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        names = list({f"name {number}" for number in range(50)})
        llama.model.layers[0].output[0][0, : len(names)] = torch.tensor([float(name.split()[1]) for name in names])
        logits = llama.logits.save()
    assert logits.shape == (1, 49_152)


def rank() -> int:
    return torch.distributed.get_rank()


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", ["waits", "raises", "hangs", "ends", "calls", "writes"])
def test_a_block_that_differs_between_ranks_ends_and_nothing_else(llama: VLLM, what: str, odd: int) -> None:
    batch = Batch(llama)
    with batch.traced(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        hidden = llama.model.layers[0].output[0]
        before = save("read")
        if rank() == odd and what == "raises":
            raise KeyError("on one rank")
        if rank() == odd and what == "hangs":
            while True:
                pass
        if rank() == odd and what == "calls":
            llama.lm_head(hidden)
        if what == "writes":
            hidden[0] += rank()
        if rank() == odd and what == "waits":
            llama.model.layers[1].mlp.act_fn.output
        if rank() != odd or what != "ends":
            llama.model.layers[2].mlp.output
    with batch.traced(PROMPT, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            llama.model.layers[0].output[0][-1] += 1
            seen.append(llama.model.layers[1].mlp.act_fn.output)
            seen.append(llama.lm_head(llama.model.layers[1].output[0]))
    batch.plain({"prompt_token_ids": PROMPT}, max_tokens=3, temperature=0, ignore_eos=True)
    wrong, right, plain = batch.run()
    kinds: dict[str, type[BaseException]] = {"raises": KeyError, "hangs": TimeLimitError}
    assert type(wrong.error) is kinds.get(what, RanksError), wrong.error
    if what not in kinds:
        assert f"on rank {odd}, it " in str(wrong.error) and "must not decide" in str(wrong.error)
    assert right.error is None and len(right.saves["seen"]) == 6
    assert len(right.tokens) == len(plain.tokens) == 3 and len(wrong.tokens) <= 3


def test_a_class_that_is_not_known_is_an_error_that_names_it(llama: VLLM) -> None:
    with pytest.raises(UnsupportedError, match="RowParallelLinear"):
        with llama.trace(PROMPT, max_tokens=1):
            import invivo.vllm_backend.parallel as parallel

            known = parallel._SPLIT
            parallel._SPLIT = ()
            try:
                llama.model.layers[0].mlp.down_proj.input
            finally:
                parallel._SPLIT = known


def test_bytes_that_cross_are_those_of_rows_of_split_ports_that_are_read(llama: VLLM) -> None:
    """Two requests, one of which reads; nothing of the other's rows goes, and nothing of whole ports."""

    def sent() -> dict[str, int]:
        import gc

        from invivo.interleaver.ranks import GroupRanks

        (ranks,) = [found for found in gc.get_objects() if type(found) is GroupRanks]
        return {str(port): count for port, count in ranks.sent.items() if port is not None}

    with llama.trace(PROMPT, max_tokens=1):
        llama.model.layers[0].output
        before = save(sent())
    batch = Batch(llama)
    batch.plain({"prompt_token_ids": PROMPT * 3}, max_tokens=1)
    with batch.traced(PROMPT, max_tokens=1):
        layer = llama.model.layers[2]
        layer.self_attn.qkv_proj.output
        layer.self_attn.output
        layer.mlp.act_fn.output
        layer.output
        after = save(sent())
    _, member = batch.run()
    more = {port: count - before.get(port, 0) for port, count in member.saves["after"].items()}
    width = 4 * len(PROMPT)
    assert {port: count for port, count in more.items() if count} == {
        "model.layers.2.self_attn.qkv_proj.output": 128 * width,
        "model.layers.2.mlp.act_fn.output": 96 * width,
    }


def test_sixty_requests_together(llama: VLLM) -> None:
    """The mixed load of `test_busy_engine.py`, with so little memory that requests are preempted."""
    requests = crowd(5, 60, traced=0.5, longest=100, budget=448)
    scheduler: Any = cast(Any, llama.engine).llm_engine.engine_core.engine_core.scheduler
    with pytest.MonkeyPatch.context() as patch:
        preempted = preemptions(scheduler, patch)
        found = run_together(llama, requests)
    assert preempted
    expected = [request.alone(llama) for request in requests[::3]]
    wrong = [text for triple in zip(requests[::3], found[::3], expected, strict=True) for text in differences(*triple)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_do_what_chance_says(llama: VLLM, seed: int) -> None:
    """Half of them do other things on each rank: these end with an error, and all others have their values."""

    def wander(trace: Any, seed: int, differs: bool) -> None:
        with trace as tracer:
            draw = random.Random(seed + 100 * rank() if differs else seed)
            seen = save([])
            for _ in tracer.iter[:]:
                for layer in llama.model.layers:
                    act = layer.mlp.act_fn
                    if (what := draw.choice(("read", "write", "call", "nothing", "odd"))) == "read":
                        seen.append(layer.self_attn.qkv_proj.output[0])
                    elif what == "write":
                        act.output[-1] *= draw.random()
                    elif what == "call":
                        seen.append(layer.mlp.down_proj(act.output)[0])
                    elif what == "odd" and differs:
                        raise KeyError("odd")
                seen.append(llama.logits)

    sampling: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    numbers = [10 * seed + number for number in range(4)]
    batch = Batch(llama)
    for number in numbers:
        wander(batch.traced(PROMPT, **sampling), number, True)
        wander(batch.traced(PROMPT[number % 5 :], **sampling), number, False)
    found = batch.run()
    for number, odd, same in zip(numbers, found[::2], found[1::2], strict=True):
        assert isinstance(odd.error, RanksError | KeyError), odd.error
        batch = Batch(llama)
        wander(batch.traced(PROMPT[number % 5 :], **sampling), number, False)
        (alone,) = batch.run()
        assert same.error is None and same.tokens == alone.tokens
        assert all(errors(*pair) < BOUND for pair in zip(same.saves["seen"], alone.saves["seen"], strict=True))


def test_f15_hidden_states_of_all_layers_of_prompt_and_generated_tokens(llama: VLLM) -> None:
    """Field report F15: neither a draft model nor pages of the cache are needed at two workers."""
    reference = Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    expected = reference.run(PROMPT, 4)
    with llama.trace(PROMPT, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            seen.append([stream(layer) for layer in llama.model.layers])
    for found, step in zip(seen, expected.steps, strict=True):
        assert all(errors(found[at], step.output(f"model.layers.{at}")) < BOUND for at in range(2))
        assert len(found) == 3 and found[2].shape == found[1].shape


def test_a_harvest(llama: VLLM, tmp_path: Path) -> None:
    """Rows of whole and of split ports, written once."""
    prompts = [[17, 49_000, 2222], [6], [1234, 777, 4000, 8, 15]]
    ports = ["sum(model.layers.0.output)", "model.layers.1.mlp.act_fn.output"]
    rows = invivo.harvest(llama, prompts, ports, tmp_path, progress=False)
    reference = Reference(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    assert len(rows) == 9
    for number, prompt in enumerate(prompts):
        step = reference.run(prompt, 1).steps[0]
        found = rows.of_prompt(number)
        assert errors(found[ports[0]], step.output("model.layers.0")) < BOUND
        assert errors(found[ports[1]], step.input("model.layers.1.mlp.down_proj")) < BOUND


@pytest.mark.parametrize("differs", [False, True])
def test_blocks_of_a_trace_meet_at_the_port_that_fires(llama: VLLM, differs: bool) -> None:
    """One that a barrier lets go on asks for the port where the others are; on one rank, one of them never comes."""
    error = None
    try:
        with llama.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
            begin, meet = tracer.barrier(2), tracer.barrier(2)
            with tracer.invoke(PROMPT):
                begin()
                for step in tracer.iter[:2]:
                    if step == 1:
                        meet()
                        met = llama.model.layers[1].mlp.act_fn.output.save()
            with tracer.invoke(PROMPT):
                begin()
                for step in tracer.iter[:2]:
                    if step == 1:
                        seen = llama.model.layers[1].mlp.act_fn.output.save()
                        if differs and rank() == 1:
                            raise KeyError("on one rank")
                        meet()
    except (KeyError, InvokeError) as raised:
        error = raised
    if differs:
        assert error is not None
    else:
        assert error is None and met.shape == (1, 192) and errors(met, seen) < BOUND


def test_a_trace_with_several_invokes(llama: VLLM) -> None:
    """A value that one hands to the other, an object that both share, and a barrier."""
    with llama.trace(max_tokens=2, temperature=0) as tracer:
        shapes = list().save()
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            clean = llama.model.layers[1].mlp.act_fn.output
            shapes.append(list(clean.shape))
        with tracer.invoke(PROMPT[:4]):
            llama.model.layers[1].mlp.act_fn.output[:] = -clean[:4]
            patched = llama.logits.save()
        with tracer.invoke(PROMPT[:4]):
            plain = llama.logits.save()
            barrier()
            shapes.append("met")
        with tracer.invoke(PROMPT[:4]):
            barrier()
            again = llama.model.layers[1].mlp.act_fn.output.save()
    assert [9, 192] in shapes and "met" in shapes and again.shape == (4, 192)
    assert patched.shape == plain.shape and errors(patched, plain) > BOUND


def test_large_saves_come_home_once(llama: VLLM) -> None:
    with llama.trace(PROMPT * 20, max_tokens=1):
        large = torch.ones(1 << 20).save()
        rows = llama.model.layers[2].output[0].save()
    assert int(large.sum()) == 1 << 20 and rows.shape == (180, 128)


def test_it_ends_in_time(llama: VLLM) -> None:
    began = time.monotonic()
    with pytest.raises(TimeLimitError):
        with llama.trace(PROMPT, max_tokens=2):
            hidden = first(llama.model.layers[0].output)
            while True:
                pass
    assert time.monotonic() - began < 20
