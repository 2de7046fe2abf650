"""Traces in an engine that prepares a step before the tokens of the last one are known, as vLLM does on GPUs.

The scripts run in processes of their own, since the platform of a process is one for good.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.platforms import plugin_folder

pytestmark = pytest.mark.engine

START = """\
import torch
torch._C.set_num_threads(1)
from collections import Counter
from invivo import VLLM, save
from support.batch import Batch
from support.busy import One, crowd, differences, run_together
from support.contract import same

BUDGET = 128
ENGINE = dict(dtype="float32", max_model_len=448, max_num_seqs=16, max_num_batched_tokens=BUDGET, block_size=32,
              num_gpu_blocks_override=15, kv_cache_memory_bytes=2**27)
model = VLLM({model!r}, **ENGINE)
core = model.engine.llm_engine.engine_core.engine_core
scheduler = core.scheduler
assert type(scheduler).__name__ == "AsyncTraceScheduler", type(scheduler)
assert core.batch_queue_size == 2
assert ("V2" in type(core.model_executor.driver_worker.worker.model_runner).__mro__[1].__name__) == {v2}

ahead = Counter()
preempted = Counter()
schedule, preempt = scheduler.schedule, scheduler._preempt_request


def watched(*args):
    before = {{request.request_id: request.num_in_flight_tokens for request in scheduler.running}}
    output = schedule(*args)
    for name in output.num_scheduled_tokens:
        if before.get(name):
            ahead["block" if name in scheduler._blocks else "other"] += 1
    return output


def counted(request, *args, **kwargs):
    preempted["traced" if request.request_id in scheduler._traced else "plain"] += 1
    preempt(request, *args, **kwargs)


scheduler.schedule, scheduler._preempt_request = watched, counted
"""

END = """
model.check_integrity()
assert not scheduler._traced and not scheduler._blocks and not scheduler._to_begin and not len(scheduler._members)
assert ahead["other"] > 0 and ahead["block"] > 0, ahead
print("all is well", dict(ahead), dict(preempted))
"""

CROWD = """
requests = crowd(11, {crowd}, traced=0.5, longest=400, budget=BUDGET)
found = run_together(model, requests)
alone = [request.alone(model) for request in requests]
wrong = [text for triple in zip(requests, found, alone, strict=True) for text in differences(*triple)]
assert not wrong, wrong
assert preempted["plain"] > 0 or {crowd} < 40, preempted
model.check_integrity()

# Plain vLLM: the methods of its own scheduler in place of ours.
from types import MethodType
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
plain = [request for request in requests if request.block is None]
mine = [member.tokens for request, member in zip(requests, found, strict=True) if request.block is None]
model.engine.reset_prefix_cache()
for name in vars(type(scheduler).__mro__[1]):
    if name != "__init__" and callable(method := getattr(AsyncScheduler, name, None)):
        setattr(scheduler, name, MethodType(method, scheduler))
assert scheduler.schedule.__func__ is AsyncScheduler.schedule
assert mine == [member.tokens for member in run_together(model, plain)]
"""

STEPS = """



prompt = list(range(5, 25))
free = One(tuple(prompt), 12, None, 0).alone(model).tokens
stop = free[5]
assert stop not in free[:5]

# The step that is computed for nothing, after a token that ends the request, is none of the block's.
with model.trace(prompt, max_tokens=12, temperature=0, stop_token_ids=[stop]) as tracer:
    steps, tokens, hidden = save([]), save([]), save([])
    for step in tracer.iter[:]:
        hidden.append(model.model.layers[1].output[0].shape[0])
        tokens.append(model.samples.item())
        steps.append(step)
    ended = len(tracer.result.outputs[0].token_ids).save()
assert steps == list(range(6)) and tokens == free[:6] and hidden == [20, 1, 1, 1, 1, 1], (steps, tokens, hidden)
assert ended == 6 and list(tracer.result.outputs[0].token_ids) == free[:6]

# One that looks at logits and samples alone runs ahead, and does not see that step either.
before = ahead["block"]
with model.trace(prompt, max_tokens=12, temperature=0, stop_token_ids=[stop]) as tracer:
    steps, tokens, logits = save([]), save([]), save([])
    for step in tracer.iter[:]:
        logits.append(model.logits.argmax(-1).item())
        tokens.append(model.samples.item())
        steps.append(step)
assert steps == list(range(6)) and tokens == logits == free[:6], (steps, tokens, logits)
assert list(tracer.result.outputs[0].token_ids) == free[:6] and ahead["block"] == before + 6

# What a block writes into the samples may be what ends the request.
with model.trace(prompt, max_tokens=12, temperature=0, stop_token_ids=[777]) as tracer:
    steps = save([])
    for step in tracer.iter[:]:
        if step == 4:
            model.samples = 777
        steps.append(step)
assert steps == list(range(5)) and list(tracer.result.outputs[0].token_ids) == [*free[:4], 777]

# One that meets modules runs ahead where no token can end it.
before = ahead["block"]
with model.trace(prompt, max_tokens=12, temperature=0, ignore_eos=True) as tracer:
    tokens, hidden = save([]), save([])
    for step in tracer.iter[:]:
        hidden.append(model.model.layers[1].output[0].shape[0])
        tokens.append(model.samples.item())
assert tokens == free and hidden == [20, *[1] * 11] and ahead["block"] == before + 11

# What the block writes is what the request goes on with, on the host and in the model.
with model.trace(prompt, max_tokens=8, temperature=0, ignore_eos=True) as tracer:
    logits = save([])
    for step in tracer.iter[:]:
        logits.append(model.logits)
        if step == 3:
            model.samples[0] = 777
assert list(tracer.result.outputs[0].token_ids[:4]) == [*free[:3], 777]
tokens = list(tracer.result.outputs[0].token_ids[4:])
forced = [*prompt, *free[:3], 777]
with model.trace(forced, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
    expected = save([])
    for step in tracer.iter[:]:
        expected.append(model.logits)
assert list(tracer.result.outputs[0].token_ids) == tokens
assert all(same(one, other) for one, other in zip(logits[4:], expected, strict=True))

# A block that ends in its first step lets its request run ahead like any other; what it wrote goes the same way.
before = ahead["other"]
with model.trace(prompt, max_tokens=8, temperature=0, ignore_eos=True) as tracer:
    model.samples[0] = 777
assert ahead["other"] >= before + 6
assert tracer.result.outputs[0].token_ids[0] == 777
assert list(tracer.result.outputs[0].token_ids[1:]) == One((*prompt, 777), 7, None, 0).alone(model).tokens

# Penalties look at the tokens so far, of which the last ones are not on the host yet.
sampling = dict(max_tokens=8, temperature=0, ignore_eos=True, repetition_penalty=1.8, presence_penalty=1.0)
batch = Batch(model)
batch.plain({{"prompt_token_ids": prompt}}, **sampling)
with batch.traced(prompt, **sampling) as tracer:
    for step in tracer.iter[:]:
        model.logits
one, other = batch.run()
assert one.tokens == other.tokens

# Ends: a block that stops, one that raises, each with the token of that step.
with model.trace(prompt, max_tokens=12, temperature=0, ignore_eos=True) as tracer:
    for step in tracer.iter[:]:
        count = step.save()
        if step == 2:
            tracer.stop()
assert count == 2 and len(tracer.result.outputs[0].token_ids) == 3
try:
    with model.trace(prompt, max_tokens=12, temperature=0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            if step == 4:
                raise KeyError(step)
except KeyError as error:
    assert error.args == (4,)
else:
    raise AssertionError("nothing was raised")

# One at a barrier is held back in time; both go on in the step that lets them, and in every round.
with model.trace(max_tokens=5, temperature=0, ignore_eos=True) as tracer:
    meet = tracer.barrier(2)
    box, order = {{}}, save([])
    with tracer.invoke(prompt):
        for step in tracer.iter[:4]:
            box[step] = model.model.layers[0].output[0][-1].clone()
            meet()
            order.append(("giver", step))
    with tracer.invoke(list(range(40, 50))):
        for step in tracer.iter[:4]:
            meet()
            order.append(("taker", step, sorted(box)))
            model.model.layers[2].output[0][-1] = box[step]
assert [entry[0] for entry in order] == ["giver", "taker"] * 4, order
assert [entry[2] for entry in order[1::2]] == [list(range(step + 1)) for step in range(4)], order

# A value that is handed on, and a trace that is preempted.
with model.trace(max_tokens=2, temperature=0, ignore_eos=True) as tracer:
    with tracer.invoke(prompt):
        for step in tracer.iter[:]:
            last = model.samples.item()
    with tracer.invoke(list(range(40, 50))):
        seen = last.save()
        model.logits
assert seen == free[1]


def edited(**stops):
    with model.trace(prompt, max_tokens=6, temperature=0, ignore_eos=True, **stops) as tracer:
        values = save([])
        for _ in tracer.iter[:]:
            model.model.layers[0].output[0][:] += 0.25
            values.append(model.logits)
    return values, list(tracer.result.outputs[0].token_ids)


def drawn(**stops):
    with model.trace(prompt, max_tokens=6, temperature=2.0, ignore_eos=True, **stops) as tracer:
        tokens = save([])
        for _ in tracer.iter[:]:
            model.model.layers[0].output
            tokens.append(model.samples.item())
    assert tokens == list(tracer.result.outputs[0].token_ids), (tokens, tracer.result)


import time
expected, free = edited()
unused = next(token for token in range(100) if token not in free)
for in_flight in (False, True):
    left = 2
    stops = {{}} if in_flight else {{"stop_token_ids": [unused]}}  # such a one does not run ahead

    def forced(*args):
        global left
        for request in [*scheduler.running]:
            ready = request.num_output_tokens >= 2 and in_flight == bool(request.num_in_flight_tokens)
            if left and ready and request.request_id in scheduler._traced:
                left -= 1
                scheduler.running.remove(request)
                scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        return watched(*args)

    scheduler.schedule = forced
    values, again = edited(**stops)
    assert left == 0 and again == free, (in_flight, left, again, free)
    assert len(values) == 6 and all(same(one, other) for one, other in zip(values, expected, strict=True))
    left = 2
    drawn(**stops)
    assert left == 0
    scheduler.schedule = watched
"""


PROCESSES = """
from invivo import VLLM, save

model = VLLM({model!r}, dtype="float32", max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=2**27)
prompt = list(range(5, 25))
with model.trace(prompt, max_tokens=6, temperature=0) as tracer:
    for step in tracer.iter[:]:
        model.logits
free = list(tracer.result.outputs[0].token_ids)
assert model.engine.llm_engine.vllm_config.scheduler_config.async_scheduling
with model.trace(prompt, max_tokens=6, temperature=0, stop_token_ids=[free[3]]) as tracer:
    tokens = save([])
    for step in tracer.iter[:]:
        tokens.append(model.samples.item())
assert tokens == free[:4] == list(tracer.result.outputs[0].token_ids)
with model.trace(prompt, max_tokens=6, temperature=0) as tracer:
    for step in tracer.iter[:]:
        if step == 1:
            h = model.model.layers[1].output[0].save()
            tracer.stop()
assert h.shape == (1, 128) and list(tracer.result.outputs[0].token_ids) == free[:2]
with model.trace(max_tokens=3, temperature=0) as tracer:
    meet = tracer.barrier(2)
    order = save([])
    for name in ("a", "b"):
        with tracer.invoke(prompt):
            for step in tracer.iter[:2]:
                meet()
                order.append((step, name))
assert order == [(0, "a"), (0, "b"), (1, "a"), (1, "b")], order
model.check_integrity()
print("all is well")
"""


def run(tmp_path: Path, source: str, processes: int, *, v2: bool = False) -> str:
    script = tmp_path / "script.py"
    tests = Path(__file__).parents[1]
    paths = [tests, tests.parent / "scripts", os.environ.get("PYTHONPATH", "")]
    if not torch.cuda.is_available():
        paths.append(plugin_folder(tmp_path / "plugin", "v2_cpu" if v2 else "async_cpu"))
    setting = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(processes),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
    }
    if v2 and not torch.cuda.is_available():
        pytest.importorskip("triton")
        setting |= {"TRITON_INTERPRET": "1", "VLLM_CPU_CI_ENV": "1"}  # the interpreter dies of the NaN of a warm-up
    crowd = 12 if "TRITON_INTERPRET" in setting else 40  # replies are kept for a minute, and the interpreter is slow
    path = str(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    script.write_text(source.format(model=path, v2=v2, crowd=crowd))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env={**os.environ, **setting}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_traces_are_as_with_synchronous_scheduling_and_others_as_with_vllms_own_scheduler(tmp_path: Path) -> None:
    assert "all is well" in run(tmp_path, START + STEPS + CROWD + END, 0)


@pytest.mark.slow
def test_the_same_on_model_runner_v2(tmp_path: Path) -> None:
    """On a CPU where Triton is installed, whose interpreter stands in for a compiler."""
    assert "all is well" in run(tmp_path, START + STEPS + CROWD + END, 0, v2=True)


@pytest.mark.slow
def test_what_is_told_survives_the_thread_that_copies(tmp_path: Path) -> None:
    """In a worker of its own, outputs are made complete and sent by another thread."""
    assert "all is well" in run(tmp_path, PROCESSES, 1)
