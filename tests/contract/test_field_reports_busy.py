"""What users of neighbouring tools met with several requests at once (docs/design.md has the rules against it).

Others are told elsewhere: resumed requests (F21, F28) and stale prefixes (F26) in test_busy_engine.py, streaming of
hidden states (F14) and of many requests at once (F32) in test_streaming.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from invivo import VLLM, save
from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import same
from support.reference import Edit, Reference

pytestmark = pytest.mark.engine

BUDGET = 128


@pytest.fixture(scope="module")
def path() -> str:
    return str(tiny_checkpoint("llama", tokenizer=smollm2_path()))


@pytest.fixture(scope="module")
def tiny(path: str) -> Reference:
    return Reference(path)


@pytest.fixture(scope="module", params=[1, 32], ids=["one at a time", "together"])
def model(request: pytest.FixtureRequest, path: str) -> Iterator[VLLM]:
    """A tiny Llama in an engine in this process, which takes that many requests at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with VLLM(
            path,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=request.param,
            max_num_batched_tokens=BUDGET,
            kv_cache_memory_bytes=2**27,
            enforce_eager=True,
        ) as made:
            yield made


@pytest.fixture(autouse=True)
def _nothing_left(model: VLLM) -> Iterator[None]:
    yield
    model.check_integrity()


def prompt(start: int, length: int) -> list[int]:
    return [(start * 7919 + index * 104_729) % 49_000 for index in range(length)]


def test_patching_from_one_invoke_to_another_equals_transformers(model: VLLM, tiny: Reference) -> None:
    """In the same step or in another one; from a late layer to an early one, which needs another step in any case."""
    giver, taker = prompt(1, 12), prompt(2, 9)
    for source, target in ((1, 1), (2, 0)):
        with model.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
            logits = save([])
            with tracer.invoke(giver):
                handed = model.model.layers[source].mlp.output[-1].clone()
            with tracer.invoke(taker):
                model.model.layers[target].mlp.output[-1] = handed
                for _ in tracer.iter[:]:
                    logits.append(model.logits)
        value = tiny.run(giver, 1).steps[0].output(f"model.layers.{source}.mlp")[-1].clone()

        def put(rows: torch.Tensor, value: torch.Tensor = value) -> None:
            rows[-1] = value

        expected = tiny.run(taker, 3, [Edit(f"model.layers.{target}.mlp", "output", 0, put)])
        assert [list(result.outputs[0].token_ids) for result in tracer.results][1] == expected.tokens
        assert all(same(one, step.logits) for one, step in zip(logits, expected.steps, strict=True))


def test_f12_each_request_steers_itself_from_its_own_values_in_every_step(model: VLLM, tiny: Reference) -> None:
    prompts = [prompt(number, 5 + number) for number in range(4)]
    with model.trace(max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        found = save([])
        for number, ids in enumerate(prompts):
            with tracer.invoke(ids):
                for _ in tracer.iter[:]:
                    hidden = model.model.layers[0].mlp.output
                    hidden += hidden.mean(0)
                    found.append((number, model.logits))

    def steer(rows: torch.Tensor) -> None:
        rows += rows.mean(0)

    for number, ids in enumerate(prompts):
        expected = tiny.run(ids, 4, [Edit("model.layers.0.mlp", "output", None, steer)])
        own = [logits for at, logits in found if at == number]
        assert all(same(one, step.logits) for one, step in zip(own, expected.steps, strict=True))


def test_f18_a_list_around_32_invokes_has_all_entries_in_order(model: VLLM) -> None:
    with model.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        entries = list().save()  # type: ignore[attr-defined]
        for number in range(32):
            with tracer.invoke(prompt(number, 3)):
                for step in tracer.iter[:]:
                    entries.append((step, number, int(model.samples[0])))
    assert len(entries) == 96
    for step in range(3):
        assert [number for at, number, _ in entries if at == step] == list(range(32))
    for number, result in enumerate(tracer.results):
        assert list(result.outputs[0].token_ids) == [token for _, at, token in entries if at == number]


@pytest.mark.parametrize("position", [0, 100])
def test_f27_an_edit_at_a_position_is_made_there_once(model: VLLM, tiny: Reference, position: int) -> None:
    """Beside a prompt that is cut: positions are the request's own, and the whole prompt is one step."""
    ids = prompt(3, 110)
    with model.trace(max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        with tracer.invoke(prompt(4, 120)):
            pass
        with tracer.invoke(ids):
            times = 0
            logits = save([])
            for step in tracer.iter[:]:
                if step == 0:
                    model.model.layers[0].mlp.output[position] += 1
                    times += 1
                logits.append(model.logits)
            times.save()  # type: ignore[attr-defined]

    def shift(rows: torch.Tensor) -> None:
        rows[position] += 1

    expected = tiny.run(ids, 3, [Edit("model.layers.0.mlp", "output", 0, shift)])
    assert times == 1
    assert all(same(one, step.logits) for one, step in zip(logits, expected.steps, strict=True))
