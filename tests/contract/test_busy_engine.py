"""A trace in a busy engine: many requests, cut prompts, little memory, a shared prefix cache.

The engine runs in this process, so that a test can watch its scheduler. Its budget is 128 tokens a step, and its memory
holds less than 500 tokens, so nearly everything that a scheduler can do to a request happens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invivo import VLLM, InvokeError, PreemptedError, PromptError, save
from invivo.vllm_backend import stuck
from smollm2 import smollm2_path
from support.batch import Batch
from support.busy import BLOCKS, One, crowd, differences, edit, once, read, run_together, values_of
from support.checkpoints import tiny_checkpoint
from support.contract import same

pytestmark = pytest.mark.engine

BUDGET = 128
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 448,
    "max_num_seqs": 32,
    "max_num_batched_tokens": BUDGET,
    "block_size": 32,
    "num_gpu_blocks_override": 15,
    "kv_cache_memory_bytes": 2**27,
    "enforce_eager": True,
}


@dataclass
class Seen:
    """What the scheduler did, and what it is made to do.

    Attributes:
        steps: number of tokens of each request, by engine step.
        preempted: how many traced and plain requests were.
        to_preempt: how many times a traced request is to be preempted once it has two tokens.
        spared: none of these is, where each is to be preempted once; None if one may be again.
    """

    steps: list[dict[str, int]] = field(default_factory=list)
    preempted: Counter[str] = field(default_factory=Counter)
    to_preempt: int = 0
    spared: set[str] | None = None

    def clear(self) -> None:
        self.steps.clear()
        self.preempted.clear()
        self.to_preempt = 0
        self.spared = None

    def preempts(self, request: Any) -> bool:
        if not self.to_preempt or request.num_output_tokens < 2 or request.request_id in (self.spared or ()):
            return False
        if self.spared is not None:
            self.spared.add(request.request_id)
        self.to_preempt -= 1
        return True


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[VLLM, Seen]]:
    """A tiny Llama in an engine in this process, and what its scheduler does."""
    seen = Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # The model is tiny: more threads only wait for each other. An engine replaces torch.set_num_threads.
        threads = torch.get_num_threads()
        torch._C.set_num_threads(1)
        with VLLM(str(tiny_checkpoint("llama", tokenizer=smollm2_path())), **ENGINE) as model:
            scheduler: Any = model.engine.llm_engine.engine_core.engine_core.scheduler
            schedule, preempt = scheduler.schedule, scheduler._preempt_request

            def watched(*args: Any) -> Any:
                for request in [*scheduler.running]:
                    if request.request_id in scheduler._traced and seen.preempts(request):
                        scheduler.running.remove(request)
                        scheduler._preempt_request(request, time.monotonic())
                output = schedule(*args)
                seen.steps.append(dict(output.num_scheduled_tokens))
                return output

            def counted(request: Any, *args: Any, **kwargs: Any) -> None:
                seen.preempted["traced" if request.request_id in scheduler._traced else "plain"] += 1
                preempt(request, *args, **kwargs)

            scheduler.schedule, scheduler._preempt_request = watched, counted
            yield model, seen
        torch._C.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_left(busy: tuple[VLLM, Seen]) -> Iterator[None]:
    model, seen = busy
    seen.clear()
    yield
    model.check_integrity()
    scheduler: Any = model.engine.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler._traced and not len(scheduler._members)
    assert "_update_request_with_output" not in vars(scheduler)
    manager = scheduler.kv_cache_manager
    for name in ("allocate_slots", "cache_blocks"):
        assert getattr(manager, name) == getattr(type(manager), name).__get__(manager), "others pay nothing for rules"


def check(model: VLLM, requests: list[One]) -> Counter[str]:
    """Run them together and alone; returns how many of each kind ended with what."""
    found = run_together(model, requests)
    expected = [request.alone(model) for request in requests]
    wrong = [text for triple in zip(requests, found, expected, strict=True) for text in differences(*triple)]
    assert not wrong, "\n".join(wrong)
    return Counter(type(member.error).__name__ for member in found)


def test_two_hundred_requests(busy: tuple[VLLM, Seen]) -> None:
    """Half of them traced, with a cache so small that requests are preempted."""
    model, seen = busy
    requests = crowd(3, 200, traced=0.5, longest=400, budget=BUDGET)
    assert {request.block for request in requests} == {None, *BLOCKS}
    assert sum(len(request.refused) for request in requests) > 50
    check(model, requests)
    assert seen.preempted["plain"] > 5


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.integers(2, 24), st.sampled_from([0.3, 0.7, 1.0]))
def test_any_crowd(busy: tuple[VLLM, Seen], seed: int, count: int, traced: float) -> None:
    check(busy[0], crowd(seed, count, traced=traced, longest=400, budget=BUDGET))


def test_traced_prompts_are_whole_and_others_are_cut_around_them(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    lengths = [BUDGET, 100, 40]
    batch = Batch(model)
    for _ in range(3):
        batch.plain({"prompt_token_ids": list(range(1, 221))}, max_tokens=3, temperature=0, ignore_eos=True)
    for length in lengths:
        read(model, batch.traced(list(range(2, length + 2)), max_tokens=3, temperature=0, ignore_eos=True), 0)
    found = batch.run()
    assert [member.error for member in found] == [None] * 6
    for member, length in zip(found[3:], lengths, strict=True):
        rows = [value[0].shape[0] for value in member.saves["seen"][::2]]
        assert rows == [length, 1, 1]
    cut = {request for step in seen.steps for request, count in step.items() if 1 < count < 40}
    assert cut, "no prompt was cut, so this showed nothing"
    assert all(sum(step.values()) <= BUDGET for step in seen.steps)


def test_a_prompt_over_the_budget_is_refused_before_it_is_sent(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    with pytest.raises(
        PromptError, match=r"129 tokens, and the engine computes at most 128.*max_num_batched_tokens=129"
    ):
        model.trace(list(range(129)), max_tokens=1)
    assert not seen.steps


@pytest.mark.parametrize("length", [100, 220])
def test_a_traced_prompt_is_not_starved_by_a_stream_of_others(busy: tuple[VLLM, Seen], length: int) -> None:
    """The others would fill every step; it begins when the requests before it leave room, not after all of them."""
    model, seen = busy
    batch = Batch(model)
    for start in range(40):
        prompt = {"prompt_token_ids": list(range(start + 1, start + 1 + length))}
        batch.plain(prompt, max_tokens=1, temperature=0, ignore_eos=True)
        if start == 3:
            read(model, batch.traced(list(range(5, 125)), max_tokens=1, temperature=0, ignore_eos=True), 0)
    found = batch.run()
    assert found[4].error is None
    began = next(index for index, step in enumerate(seen.steps) if 120 in step.values())
    assert began < len(seen.steps) / 2


def test_an_edit_never_shows_in_a_later_request_with_the_same_prompt(busy: tuple[VLLM, Seen]) -> None:
    model, _ = busy
    prompt = list(range(10, 110))
    plain = One(tuple(prompt), 6, None, 0)
    expected = plain.alone(model)
    model.engine.reset_prefix_cache()
    edited = One(tuple(prompt), 6, once, 0).alone(model)
    assert edited.error is None
    again = plain.alone(model)
    assert again.output.num_cached_tokens == 0
    assert again.tokens == expected.tokens


def test_untraced_requests_hit_the_cache_as_before(busy: tuple[VLLM, Seen]) -> None:
    model, _ = busy
    prompt = tuple(range(20, 120))
    plain = One(prompt, 2, None, 0)
    model.engine.reset_prefix_cache()
    first, second = plain.alone(model), plain.alone(model)
    assert (first.output.num_cached_tokens, second.output.num_cached_tokens) == (0, 96)
    One(prompt, 2, edit, 0).alone(model)
    assert plain.alone(model).output.num_cached_tokens == 96


def test_a_trace_may_take_its_prefix_from_the_cache(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    prompt = list(range(30, 130))
    model.engine.reset_prefix_cache()
    One(tuple(prompt), 1, None, 0).alone(model)
    with model.trace(prompt, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        whole = save([])
        for _ in tracer.iter[:]:
            whole.append(model.model.norm.output[0])
    seen.clear()
    with model.trace(prompt, max_tokens=3, temperature=0, ignore_eos=True, reuse_prefix=True) as tracer:
        rest = save([])
        for _ in tracer.iter[:]:
            rest.append(model.model.norm.output[0])
    assert [value.shape[0] for value in whole] == [100, 1, 1]
    assert [value.shape[0] for value in rest] == [4, 1, 1]
    assert [sum(step.values()) for step in seen.steps if step] == [4, 1, 1]
    assert all(same(one, other[-len(one) :]) for one, other in zip(rest, whole, strict=True))


def test_a_trace_with_a_cached_prefix_leaves_nothing_in_the_cache(busy: tuple[VLLM, Seen]) -> None:
    model, _ = busy
    prompt = list(range(40, 100))
    plain = One(tuple(prompt), 1, None, 0)
    model.engine.reset_prefix_cache()
    expected = One(tuple(prompt), 40, None, 0).alone(model)
    model.engine.reset_prefix_cache()
    plain.alone(model)
    with model.trace(prompt, max_tokens=40, temperature=0, ignore_eos=True, reuse_prefix=True) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[0].output[0][:] += 1
    longer = One((*prompt, *expected.tokens), 2, None, 0)
    assert longer.alone(model).output.num_cached_tokens == 32


def test_preempted_blocks_are_right_or_refused(busy: tuple[VLLM, Seen]) -> None:
    """With nobody else to take from, traced requests are preempted: those that only read go on, and are right."""
    model, seen = busy
    prompts = [tuple(range(start, start + 60)) for start in range(10, 70, 10)]
    requests = [One(prompt, 24, (read, edit)[index % 2], 0) for index, prompt in enumerate(prompts)]
    kinds = check(model, requests)
    assert seen.preempted["traced"] > 0
    assert kinds["NoneType"] >= 3


def test_the_error_of_a_preemption_says_what_to_do(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    requests = [One(tuple(range(start, start + 60)), 24, edit, 0) for start in range(10, 70, 10)]
    errors = [member.error for member in run_together(model, requests) if member.error is not None]
    assert seen.preempted["traced"] > 0 and errors
    assert all(isinstance(error, PreemptedError) for error in errors)
    assert "memory for keys and values ran out" in str(errors[0]) and "max_num_seqs" in str(errors[0])


def edited_run(model: VLLM) -> tuple[list[torch.Tensor], list[int]]:
    """A trace that edits in every step: what it read, and its tokens."""
    with model.trace(list(range(3, 43)), max_tokens=6, temperature=0, ignore_eos=True) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            model.model.layers[0].output[0][:] += 0.25
            seen.append(model.model.norm.output[0])
        tokens = list(tracer.result.outputs[0].token_ids)
        save(tokens)
    return seen, tokens


def test_a_trace_that_is_preempted_is_run_again(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    expected, tokens = edited_run(model)
    seen.to_preempt = 2
    found, again = edited_run(model)
    assert seen.preempted["traced"] == 2
    assert again == tokens
    assert len(found) == 6 and all(same(one, other) for one, other in zip(found, expected, strict=True))


def steered(model: VLLM) -> tuple[list[Any], list[list[int]]]:
    """Two invokes that edit, and share a list which they change."""
    with model.trace(max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        seen = save(["before"])
        for start in (3, 50):
            with tracer.invoke(list(range(start, start + 20))):
                for step in tracer.iter[:]:
                    model.model.layers[0].output[0][:] += 0.25 * len(seen[0])
                    seen.append((start, step, model.logits))
    return seen, [list(result.outputs[0].token_ids) for result in tracer.results]


def test_invokes_that_are_preempted_are_all_run_again_from_what_they_shared_at_first(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    expected, tokens = steered(model)
    seen.to_preempt = 2
    found, again = steered(model)
    assert seen.preempted["traced"] == 2
    assert again == tokens
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert all(same(one[2], other[2]) for one, other in zip(found[1:], expected[1:], strict=True))


def meeting(model: VLLM, lengths: list[int]) -> list[Any]:
    """Invokes that all meet at a barrier in their first step; gives what they append to a list after it."""
    with model.trace(max_tokens=2, temperature=0, ignore_eos=True) as tracer:
        meet = tracer.barrier(len(lengths))
        box: dict[int, Any] = {}
        seen = save([])
        for at, length in enumerate(lengths):
            with tracer.invoke(list(range(5, 5 + length))):
                box[at] = model.model.layers[0].output[0].shape[0]
                meet()
                for step in tracer.iter[1:]:
                    seen.append((at, step, sorted(box.values()), model.samples.item()))
    return seen


def test_a_barrier_that_more_meet_at_than_run_at_a_time(busy: tuple[VLLM, Seen], monkeypatch: Any) -> None:
    """One at a barrier gives up its place; afterwards they go on one by one."""
    model, _ = busy
    scheduler: Any = model.engine.llm_engine.engine_core.engine_core.scheduler
    if scheduler.use_v2_model_runner:
        pytest.skip("Runner V2 keeps a place for one at a barrier")
    expected = meeting(model, [10, 20, 30])
    monkeypatch.setattr(scheduler, "max_num_running_reqs", 1)
    monkeypatch.setattr(scheduler, "max_num_active_reqs", 1)
    assert sorted(meeting(model, [10, 20, 30])) == sorted(expected)


def test_a_barrier_that_there_is_no_memory_for(busy: tuple[VLLM, Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = busy
    monkeypatch.setattr(stuck, "PATIENCE", 0.1)
    with pytest.raises(InvokeError, match=r"invoke 0 stood at a barrier, .* found no memory for their keys and values"):
        meeting(model, [120] * 5)


def test_nobody_more_is_let_in_for_those_that_are_left_out(busy: tuple[VLLM, Seen], monkeypatch: Any) -> None:
    """A long prompt is left out for a traced one; what is left of the step is not for others, as it comes back."""
    model, seen = busy
    scheduler: Any = model.engine.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_num_running_reqs", 2)
    monkeypatch.setattr(scheduler, "max_num_active_reqs", 2)
    batch = Batch(model)
    batch.plain({"prompt_token_ids": list(range(1, 391))}, max_tokens=2, temperature=0, ignore_eos=True)
    read(model, batch.traced(list(range(2, 52)), max_tokens=2, temperature=0, ignore_eos=True), 0)
    for start in (3, 4):
        prompt = {"prompt_token_ids": list(range(start, start + 10))}
        batch.plain(prompt, max_tokens=2, temperature=0, ignore_eos=True)
    assert [member.error for member in batch.run()] == [None] * 4
    assert any(50 in step.values() for step in seen.steps)
    assert all(len(step) <= 2 for step in seen.steps)


def test_a_trace_that_is_preempted_again_and_again_ends(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    seen.to_preempt, seen.spared = 3, set()
    with pytest.raises(PreemptedError, match=r"had to end before step [23]"):
        edited_run(model)
    assert seen.preempted["traced"] == 3


def test_a_trace_that_reads_goes_on_after_every_preemption(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    one = One(tuple(range(9, 49)), 6, read, 0)
    expected = one.alone(model)
    seen.to_preempt = 3
    found = one.alone(model)
    assert seen.preempted["traced"] == 3
    assert differences(one, found, expected) == []


def test_untraced_requests_are_preempted_first(busy: tuple[VLLM, Seen]) -> None:
    model, seen = busy
    plain = [One(tuple(range(start, start + 60)), 24, None, 0) for start in range(10, 60, 10)]
    traced = One(tuple(range(5, 65)), 24, edit, 0)
    kinds = check(model, [*plain, traced])
    assert seen.preempted["plain"] > 0 and not seen.preempted["traced"]
    assert kinds == {"NoneType": 6}


def test_values_do_not_depend_on_who_is_in_the_batch(busy: tuple[VLLM, Seen]) -> None:
    """The same trace, alone and in the middle of others: equal up to the order of sums."""
    model, _ = busy
    one = One(tuple(range(7, 27)), 5, read, 0)
    others = [One(tuple(range(start, start + 9)), 5, None, 0) for start in range(100, 103)]
    alone, beside = one.alone(model), run_together(model, [*others, one, *others])[3]
    pairs = zip(values_of(alone), values_of(beside), strict=True)
    assert all(same(found, expected) for expected, found in pairs)
