"""What the parts of the GPU's benchmarks share: one engine with a random model, and the traces."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from measure import Measured, Watch, alternate
from smollm2 import smollm2_path

LAYERS, WIDTH, VOCABULARY = 16, 2048, 49_152
MIDDLE = LAYERS // 2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
"""A Llama of 1.1 B parameters, whose weights are random: how fast it is does not depend on them."""

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 8 << 30,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}
"""Of the engine. Everything else is vLLM's default: compiled, CUDA graphs, chunked prefill, asynchronous scheduling."""


class GpuBench:
    """One run, with one engine, in this process. The arguments and methods are `bench.Bench`'s."""

    def __init__(self, quick: bool, watch: Watch) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self.quick = quick
        self.watch = watch
        self._random = random.Random(0)
        self._folder: Any = None

    def rounds(self, count: int) -> int:
        """How many of `count` rounds are made."""
        return max(2, count // 4) if self.quick else count

    @cached_property
    def model(self) -> Any:
        """The engine, as an `invivo.VLLM`."""
        from invivo import VLLM

        self._folder = tempfile.TemporaryDirectory(prefix="invivo-gpu-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(smollm2_path() / name, folder)
        self.watch("starting the engine", 0, 1)
        return VLLM(str(folder), **SETTINGS).dispatch()

    def alternate(self, functions: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1) -> Measured:
        """See `measure.alternate`."""
        return alternate(functions, self.rounds(rounds), warm, self.watch)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts of random tokens."""
        return [[self._random.randrange(1000, VOCABULARY) for _ in range(length)] for _ in range(count)]

    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds that untraced requests take."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return timed(lambda: self.model.engine.generate(given, params, use_tqdm=False))

    def traced(self, prompts: list[list[int]], tokens: int, invoke: Callable[[Any, Any, list[int]], Any]) -> float:
        """Seconds from the outer `with` to its end, when everything is home."""

        def run() -> None:
            with self.model.trace(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False) as tracer:
                for prompt in prompts:
                    invoke(self.model, tracer, prompt)

        return timed(run)

    @contextmanager
    def steps(self) -> Iterator[list[float]]:
        """The seconds of each engine step in this context: how long every request in it waits for its next token."""
        engine, seen = self.model.engine.llm_engine, list[float]()
        step = engine.step

        def watched() -> Any:
            began = time.perf_counter()
            found = step()
            seen.append(time.perf_counter() - began)
            return found

        engine.step = watched
        try:
            yield seen
        finally:
            engine.step = step

    def close(self) -> None:
        """End the engine."""
        if "model" in vars(self):
            self.model.check_integrity()
            self.model.close()
        if self._folder is not None:
            self._folder.cleanup()


def timed(run: Callable[[], object]) -> float:
    """Seconds that something takes, with what it leaves to the GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def per_second(size: float, seconds: list[float]) -> str:
    """A rate of bytes."""
    return f"{size / statistics.median(seconds) / 1e9:.1f} GB/s"


# --- the traces, at every step


def logits(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            model.logits


def read_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            model.model.layers[MIDDLE].output[0]


def read_all(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            for layer in model.model.layers:
                layer.output[0]


def save_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = []
        for _ in tracer.iter[:]:
            kept.append(model.model.layers[MIDDLE].output[0])
        kept.save()


def steer_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            model.model.layers[MIDDLE].output[0][:] += VECTOR


VECTOR = torch.linspace(-1e-3, 1e-3, WIDTH).to(torch.bfloat16)


# --- of the prompt


def whole_all(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = [layer.output[0] for layer in model.model.layers]
        kept.save()


def read_prompt(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for layer in model.model.layers:
            layer.output[0]
