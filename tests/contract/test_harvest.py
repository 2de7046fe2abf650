"""`invivo.harvest`: the rows in its files are those of transformers, for an engine and for a module in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import invivo
from invivo import VLLM, Activations, Local, MisuseError, PortNotReachedError, PromptError, UnknownNameError
from invivo.interleaver.harvest.progress import Bar
from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import prompt_ids, same
from support.reference import Reference

pytestmark = pytest.mark.engine

PROMPTS = [[17, 49_000, 2222, 31, 5], [6], [1234, 777, 4000, 8, 15, 16, 23, 42], [99, 100]]
STREAMS = "sum(model.layers.*.output)"
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 2**27,
}


class Enough(Exception):
    """Ends a harvest in the middle."""


@dataclass
class Case:
    """A model to harvest, and what transformers has for every prompt."""

    model: Any
    reference: Reference

    def hidden(self, prompt: list[int]) -> list[torch.Tensor]:
        """The embedding, the stream after each layer but the last, and the final norm."""
        module = cast(Any, self.reference.model)
        with torch.no_grad():
            states = module(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
        return [state[0] for state in states]


@pytest.fixture(scope="module", params=["vllm", "local"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    path = tiny_checkpoint("llama", tokenizer=smollm2_path())
    reference = Reference(path)
    if request.param == "local":
        from transformers import AutoTokenizer

        yield Case(Local(reference.model, AutoTokenizer.from_pretrained(path)), reference)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = torch.get_num_threads()
        torch._C.set_num_threads(1)
        with VLLM(str(path), **ENGINE) as model:
            yield Case(model, reference)
        torch._C.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_left(case: Case) -> Iterator[None]:
    yield
    case.model.check_integrity()


def harvest(case: Case, out: Path, ports: Any = STREAMS, prompts: Any = PROMPTS, **given: Any) -> Activations:
    return invivo.harvest(case.model, prompts, ports, out, progress=False, **given)


def test_values_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    rows = harvest(case, tmp_path, [STREAMS, "model.layers.1.mlp.input", "model.norm"], shard_size=20_000)
    assert len(rows.manifest.shards) > 1
    assert rows.manifest.complete
    assert rows.manifest.rows == len(rows) == sum(map(len, PROMPTS))
    normed = "model.norm.output[0]" if "model.norm.output[0]" in rows.columns else "model.norm.output"
    for number, prompt in enumerate(PROMPTS):
        found, expected = rows.of_prompt(number), case.hidden(prompt)
        assert found["token_id"].tolist() == prompt
        assert found["position"].tolist() == list(range(len(prompt)))
        assert set(found["prompt"].tolist()) == {number}
        for layer in range(2):
            assert same(found[f"sum(model.layers.{layer}.output)"], expected[layer + 1])
        assert same(found[normed], expected[-1])
        norm = cast(Any, case.reference.model).model.norm
        assert same(norm(found["sum(model.layers.2.output)"]).detach(), expected[-1])
    files = [load_file(path) for path in sorted(tmp_path.glob("shard-*"))]
    assert sum(len(file["prompt"]) for file in files) == len(rows)


def test_dtype_and_positions(case: Case, tmp_path: Path) -> None:
    port = "sum(model.layers.0.output)"
    last = harvest(case, tmp_path / "last", [port, "logits"], positions="last", dtype="bfloat16")
    some = harvest(case, tmp_path / "some", port, positions=slice(1, None, 3))
    for number, prompt in enumerate(PROMPTS):
        expected = case.hidden(prompt)[1]
        found = last.of_prompt(number)
        assert found["logits"].shape == (1, 49_152)
        assert found[port].dtype == found["logits"].dtype == torch.bfloat16
        assert torch.allclose(found[port].float(), expected[-1:], rtol=1e-2, atol=1e-2)
        assert found["position"].tolist() == [len(prompt) - 1]
        if len(prompt) > 1:
            assert same(some.of_prompt(number)[port], expected[1::3])
    assert some.prompts == [0, 2, 3], "prompt 1 has one token"
    with pytest.raises(MisuseError, match="`logits` is computed for the last token"):
        harvest(case, tmp_path / "no", "logits")


def test_generated_tokens_have_rows(case: Case, tmp_path: Path) -> None:
    port = "sum(model.layers.1.output)"
    rows = harvest(case, tmp_path, port, generate=3, positions=slice(-2, None), ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        found = rows.of_prompt(number)
        kept = min(len(prompt), 2)
        whole = prompt + found["token_id"][kept:].tolist()
        assert len(whole) == len(prompt) + 3
        assert found["position"].tolist() == list(range(len(prompt) - kept, len(whole)))
        assert same(found[port], case.hidden(whole)[2][len(prompt) - kept :])


def test_text_and_chat(case: Case, tmp_path: Path) -> None:
    text = "The Eiffel Tower"
    rows = harvest(case, tmp_path, "model.norm", [text, [{"role": "user", "content": "Where?"}]])
    assert rows.of_prompt(0)["token_id"].tolist() == prompt_ids(case.model, text)
    assert rows.of_prompt(1)["token_id"].tolist()[:2] == prompt_ids(case.model, "<|im_start|>system")


def test_a_harvest_goes_on_where_it_was(case: Case, tmp_path: Path) -> None:
    def step(self: Bar, tokens: int, size: int) -> None:
        raise Enough

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bar, "step", step)
        with pytest.raises(Enough):
            harvest(case, tmp_path, shard_size=1)
    case.model.check_integrity()
    there = Activations(tmp_path)
    assert not there.manifest.complete
    assert 1 <= len(there.prompts) <= 4
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    rows = harvest(case, tmp_path, shard_size=1)
    assert rows.manifest.complete
    assert rows.prompts == [0, 1, 2, 3]
    assert len(rows) == sum(map(len, PROMPTS)), "nothing is there twice"
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    assert before.items() <= after.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ports": "model.norm"}, r"ports: .*sum\(model.layers.0.output\).* there, .*model.norm.output"),
        ({"dtype": "float16"}, "columns: .*float32.* there, .*float16"),
        ({"prompts": [*PROMPTS[:3], [1, 2]]}, "prompts_sha256"),
        ({"positions": "last"}, "positions"),
    ],
)
def test_another_harvest_in_the_folder_is_refused(
    case: Case, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    harvest(case, tmp_path)
    with pytest.raises(MisuseError, match=f"holds another harvest.*{message}"):
        harvest(case, tmp_path, **change)
    harvest(case, tmp_path)


def test_names_that_do_not_exist(case: Case, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"`model.layers.\*.mpl`: .*Did you mean `mlp`"):
        harvest(case, tmp_path, "model.layers.*.mpl")
    if isinstance(case.model, VLLM):  # where the head does not run as a module
        with pytest.raises(PortNotReachedError, match=r"`lm_head\.output` has nothing to give"):
            harvest(case, tmp_path, "lm_head")
    with pytest.raises(MisuseError, match=r"has no part \[7\]"):
        harvest(case, tmp_path, "model.layers.0.input_layernorm.inputs[7]")
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_prompts_are_checked_before_anything_runs(case: Case, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="prompt 1: the prompt is empty"):
        harvest(case, tmp_path, prompts=[[1], []])
    with pytest.raises(PromptError, match="got one str"):
        harvest(case, tmp_path, prompts="The Eiffel Tower")
    with pytest.raises(PromptError, match="there are no prompts"):
        harvest(case, tmp_path, prompts=[])
    long = [[5] * 70, [6] * 3, [7] * 64]
    if isinstance(case.model, VLLM):
        with pytest.raises(PromptError, match=r"2 of 3 prompts have more than 63 tokens: 0 \(70 tokens\), 2 \(64"):
            harvest(case, tmp_path, prompts=long)
        rows = harvest(case, tmp_path / "cut", prompts=long, truncate=True)
        assert [len(rows.of_prompt(number)["prompt"]) for number in range(3)] == [63, 3, 63]
    rows = harvest(case, tmp_path / "short", prompts=long, truncate=5)
    assert [rows.of_prompt(number)["token_id"].tolist() for number in range(3)] == [[5] * 5, [6] * 3, [7] * 5]


def test_a_disk_that_is_too_small(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(MisuseError, match=r"the harvest writes .* KiB into .*, where 100 bytes are free"):
        harvest(case, tmp_path)
