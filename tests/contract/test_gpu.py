"""What only a GPU shows: CUDA graphs, the GPU's random numbers, its memory of keys and values.

The other tests of the contract run on a GPU as they are; this is what they cannot ask on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from invivo import VLLM, MemoryLimitError, save
from invivo.vllm_backend.graphs import Graphs
from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import TINY_ENGINE, runner_of

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PROMPT = list(range(5, 25))
STEPS = 6
ENGINE: dict[str, Any] = TINY_ENGINE | {
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 12,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def model() -> Iterator[VLLM]:
    """An engine with vLLM's defaults, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with VLLM(str(tiny_checkpoint("llama", tokenizer=smollm2_path())), **ENGINE) as made:
            yield made.dispatch()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with every CUDA graph that is replayed."""
    seen: list[object] = []
    replay = torch.cuda.CUDAGraph.replay

    def watched(graph: torch.cuda.CUDAGraph) -> None:
        seen.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", watched)
    return seen


def plain(model: VLLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = model.generate(prompts, max_tokens=STEPS, temperature=0, ignore_eos=True, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_only_steps_with_modules_go_without_graphs(
    model: VLLM, replays: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(runner_of(model)), "can_capture", False, raising=False)

    def of_a_trace(reads: range) -> int:
        replays.clear()
        with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
            for step in tracer.iter[:]:
                if step in reads:
                    model.model.layers[1].output
                model.logits
        return len(replays)

    plain(model, [PROMPT])
    replays.clear()
    plain(model, [PROMPT])
    untraced = len(replays)
    assert untraced > 0
    assert of_a_trace(range(0)) == untraced
    assert of_a_trace(range(STEPS)) == 0
    assert of_a_trace(range(2, 4)) == untraced - 2
    replays.clear()
    plain(model, [PROMPT])
    assert len(replays) == untraced


def test_steps_that_meet_the_same_modules_replay_pieces_of_a_graph(
    model: VLLM, replays: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(runner_of(model), "pieces"):
        pytest.skip("with Model Runner V2 only")

    def run(steps: int, other: int = -1) -> tuple[list[torch.Tensor], list[int], int]:
        replays.clear()
        with model.trace(PROMPT, max_tokens=steps, temperature=0, ignore_eos=True) as tracer:
            seen: list[Any] = []
            for step in tracer.iter[:]:
                layer = model.model.layers[0].output[0]
                layer[:] *= 1.5
                seen.append(model.model.layers[2 if step == other else 1].mlp.output[-1])
                seen.append(model.model.norm.output[0][-1])
                seen.append(model.logits[-1])
            seen.save()
        return seen, list(tracer.result.outputs[0].token_ids), len(replays)

    with monkeypatch.context() as without:
        without.setattr(type(runner_of(model)), "can_capture", False)
        expected, tokens, none = run(12)
        elsewhere, others, _ = run(12, 8)
    assert none == 0
    run(5)
    found, same, replayed = run(12)
    assert replayed == 11 * 2 and same == tokens and max(differ(found, expected)) < 1e-2
    found, same, again = run(12, 8)
    assert again > 0 and same == others and max(differ(found, elsewhere)) < 1e-2


def differ(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]


def look(model: Any, step: int, edit: bool) -> list[torch.Tensor]:
    """Read in a step, which goes on with a token that is given; maybe edit."""
    seen = [part[-1] for part in model.model.layers[0].output]
    hidden = model.model.layers[1].mlp.output
    if edit:
        hidden[:] *= 1.5
    seen += [hidden[-1], model.model.layers[2].input[-1], model.logits[-1]]
    model.samples[0] = 7 + step
    return seen


def test_ports_that_are_only_read_leave_the_graph_whole(
    model: VLLM, replays: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(runner_of(model), "pieces"):
        pytest.skip("with Model Runner V2 only")

    def run(steps: int, edited: int = -1) -> tuple[list[torch.Tensor], int]:
        replays.clear()
        with model.trace(max_tokens=steps, temperature=0, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT):
                one: Any = save([look(model, step, step == edited) for step in tracer.iter[:]])
            with tracer.invoke(PROMPT[::-1]):
                two: Any = save([look(model, step, False) for step in tracer.iter[:]])
        return [part for seen in [*one, *two] for part in seen], len(replays)

    monkeypatch.setattr(runner_of(model), "pieces", None)
    with monkeypatch.context() as without:
        without.setattr(type(runner_of(model)), "can_capture", False)
        expected, none = run(12)
        elsewhere, _ = run(12, 8)
    assert none == 0
    run(5)
    found, replayed = run(12)
    assert replayed >= 11 and max(differ(found, expected)) < 1e-2
    assert {len(forward.pieces) for forward in runner_of(model).pieces._forwards.values()} == {2}  # a graph, and turns
    found, again = run(12, 8)
    assert again > 0 and max(differ(found, elsewhere)) < 1e-2
    assert runner_of(model).pieces.missed == 1
    found, _ = run(12, 8)
    assert runner_of(model).pieces.missed == 2 and max(differ(found, elsewhere)) < 1e-2
    found, replayed = run(12)
    assert replayed >= 11 and max(differ(found, expected)) < 1e-2
    model.check_integrity()


def test_every_copy_has_memory_of_its_own(model: VLLM) -> None:
    with model.trace(max_tokens=8, temperature=0, ignore_eos=True) as tracer:
        where: list[Any] = []
        for prompt in (PROMPT, PROMPT[::-1]):
            with tracer.invoke(prompt):
                for step in tracer.iter[:]:
                    kept = [*model.model.layers[0].output, *model.model.layers[1].output, model.logits]
                    where.append(
                        [(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in kept]
                    )
        where.save()
    for places in where:
        assert len({place for place, _ in places}) == len(places)
    assert {size for _, size in where[-1][:4]} == {128 * 2}  # a row, and no more


def test_what_a_block_draws_on_the_gpu_is_its_own(model: VLLM) -> None:
    def drawn(seed: int) -> list[float]:
        with model.trace(PROMPT, max_tokens=1, temperature=0, seed=seed):
            hidden = model.model.layers[0].output[0]
            numbers = torch.randn(3, device=hidden.device).save()
        return list(numbers.tolist())

    before = torch.cuda.get_rng_state()
    first = drawn(1)
    assert drawn(1) == first != drawn(2)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_nothing_of_an_edit_is_left_in_the_cache(model: VLLM) -> None:
    """Blocks of keys and values that hold NaN would spoil whoever has them next."""
    prompts = [[n] * 40 for n in (3, 4, 5, 6)]
    expected = plain(model, prompts)
    for _ in range(3):
        with model.trace([9] * 100, max_tokens=3, temperature=0, ignore_eos=True):
            model.model.layers[0].output[0][:] = float("nan")
            spoiled = model.logits.isnan().all().save()
        assert spoiled
        assert plain(model, prompts) == expected
    assert not any(bool(cache.isnan().any()) for cache in runner_of(model).kv_caches)


def test_tensors_of_the_gpu_come_home_as_tensors_of_the_cpu(model: VLLM) -> None:
    vector = torch.ones(128, dtype=torch.bfloat16)  # goes to the model's device with the block
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
        small: list[Any] = []
        for _ in tracer.iter[:]:
            hidden = model.model.layers[1].output[0]
            small.append(hidden[-1] + vector)
            large = torch.arange(2**20, device=hidden.device)
        large.save(), small.save()
    assert {value.device.type for value in [*small, large]} == {"cpu"}
    assert (len(small), int(large[-1])) == (STEPS, 2**20 - 1)


def test_large_saves_are_copied_by_the_gpu_into_files_that_are_used_again(model: VLLM) -> None:
    prompts = [[n] * 100 for n in range(3, 9)]

    def run(times: int) -> list[list[torch.Tensor]]:
        invokes = []
        with model.trace(max_tokens=4, temperature=0, ignore_eos=True) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt) as one:
                    hidden, residual = model.model.layers[1].output
                    seen: Any = [hidden.repeat(times, 1), residual.repeat(times, 1), hidden[::2], hidden.T]
                    seen.save()
                invokes.append(one)
        return [one.saves["seen"] for one in invokes]

    small, files = run(1), runner_of(model).serving.outbox._files
    run(80)
    model.check_integrity()
    kept = {file.inode for file in files._kept}
    for _ in range(3):
        for found, expected in zip(run(80), small, strict=True):
            assert all(torch.equal(a, b.repeat(80, 1)) for a, b in zip(found[:2], expected[:2], strict=True))
            assert torch.equal(found[2], expected[2]) and torch.equal(found[3], expected[3])
            found[0].zero_()
        del found
        model.check_integrity()
    assert kept and {file.inode for file in files._kept} == kept


def test_a_tensor_of_another_device_is_refused(model: VLLM) -> None:
    with pytest.raises(Exception, match=r"on cuda:0, and got bfloat16 \[20, 128\]: the device must be the same"):
        with model.trace(PROMPT, max_tokens=1, temperature=0):
            model.model.layers[1].mlp.output = torch.zeros(20, 128, dtype=torch.bfloat16)


def test_more_memory_than_the_gpu_has_is_an_error_of_the_block(model: VLLM) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        with model.trace(PROMPT, max_tokens=2, temperature=0):
            torch.empty(10**12, device=model.logits.device)
    assert len(plain(model, [PROMPT])[0]) == STEPS


def test_what_a_block_holds_on_the_gpu_is_bounded(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def holding(mib: int) -> None:
        with model.trace(PROMPT, max_tokens=STEPS, temperature=0, ignore_eos=True) as tracer:
            kept = [torch.empty(mib << 20, dtype=torch.uint8, device=model.logits.device) for _ in tracer.iter[:]]
            len(kept)

    holding(1)
    monkeypatch.setattr(runner_of(model).serving._device_limit, "_limit", 256 << 20)
    before = torch.cuda.memory_allocated()
    holding(40)
    with pytest.raises(MemoryLimitError, match=r"holds 30\d\.\d MiB of the GPU's memory, and the limit is 256\.0 MiB"):
        holding(100)
    assert torch.cuda.memory_allocated() < before + (40 << 20)
    assert len(plain(model, [PROMPT])[0]) == STEPS
    model.check_integrity()


def test_blocks_that_only_read_have_several_steps_in_one_turn(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they get is what they get step by step."""
    if not hasattr(runner_of(model), "pieces"):
        pytest.skip("with Model Runner V2 only")
    steps, prompts = 60, [PROMPT, PROMPT[::-1], PROMPT[3:]]

    def run() -> tuple[list[list[Any]], list[list[int]]]:
        invokes = []
        with model.trace(max_tokens=steps, temperature=0, ignore_eos=True) as tracer:
            for at, prompt in enumerate(prompts):
                with tracer.invoke(prompt, max_tokens=steps - 9 * at) as one:
                    seen: Any = []
                    for _ in tracer.iter[:]:
                        hidden, residual = model.model.layers[1].output
                        inner = model.model.layers[2].mlp.output
                        seen.append([hidden, residual, inner, model.logits, model.samples])
                    seen.save()
                invokes.append(one)
        return [one.saves["seen"] for one in invokes], [list(one.result.outputs[0].token_ids) for one in invokes]

    hub = runner_of(model).serving.hub
    with monkeypatch.context() as without:
        without.setattr(type(hub), "lags", lambda *_, **__: False)
        expected, tokens = run()
    before = hub.kept
    found, same = run()
    assert hub.kept > before + 30 and hub.strayed == 0
    assert same == tokens
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        for parts, others in zip(one, other, strict=True):
            assert all(torch.equal(*pair) for pair in zip(parts, others, strict=True))
    model.check_integrity()


def test_a_block_that_strays_is_run_again(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(runner_of(model), "pieces"):
        pytest.skip("with Model Runner V2 only")

    which = [1] * 30 + [2] + [1] * 30

    def run() -> list[torch.Tensor]:
        with model.trace(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) as tracer:
            seen: Any = []
            for step in tracer.iter[:]:
                seen.append(model.model.layers[which[step]].mlp.output)
            seen.save()
        assert len(tracer.result.outputs[0].token_ids) == 50
        return list(seen)

    hub = runner_of(model).serving.hub
    with monkeypatch.context() as without:
        without.setattr(type(hub), "lags", lambda *_, **__: False)
        expected = run()
    strayed = hub.strayed
    found = run()
    assert hub.strayed == strayed + 1
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    model.check_integrity()


def test_new_ports_hold_nobody_up_and_one_look_captures_nothing(model: VLLM) -> None:
    if not hasattr(runner_of(model), "pieces"):
        pytest.skip("with Model Runner V2 only")
    engine: Any = model.engine.llm_engine
    step, took = engine.step, list[float]()

    def timed() -> Any:
        began = time.perf_counter()
        found = step()
        took.append(time.perf_counter() - began)
        return found

    def run(reads: range) -> int:
        before = set(runner_of(model).pieces._forwards)
        with model.trace(max_tokens=12, temperature=0, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT):
                for number in tracer.iter[:]:
                    if number in reads:
                        model.model.layers[0].self_attn.o_proj.output
            with tracer.invoke(PROMPT[::-1]):
                model.logits
        return len(set(runner_of(model).pieces._forwards) - before)

    run(range(12))  # compiles what Triton needs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_of(model), "pieces", Graphs(runner_of(model).model_state.model))
        patch.setattr(engine, "step", timed)
        assert run(range(5, 6)) == 0
        assert run(range(12)) == 1
    assert max(took) < 1
