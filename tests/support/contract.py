"""Words that the contract tests share.

The backends hold the same quantities in different shapes: transformers keeps a batch dimension of one, and vLLM's
layers return a pair whose sum is the residual stream. `rows`, `stream` and `first` give one form to both. Blocks use
them like any helper of the caller's: they travel to the engine by value.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": True,
}
"""Arguments of the engines that tests start. Compiling takes a minute; `test_compiled.py` has engines that do."""

TINY_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 2**27,
}
"""The same for tiny models in this process, compiled unless a test says otherwise."""

PROMPT = "The Eiffel Tower is in the city of"
OTHER = "The capital of Japan is"
BOUND = 1e-4


def runner_of(model: Any) -> Any:
    """The model runner of an engine in this process with one worker."""
    return model.engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def first(value: Any) -> torch.Tensor:
    """The tensor itself, or the first part of a tuple."""
    found: torch.Tensor = value[0] if isinstance(value, tuple) else value
    return found


def rows(value: Any) -> torch.Tensor:
    """The first tensor of a port as ``[rows, ...]``, without a batch dimension."""
    tensor = first(value)
    return tensor[0] if tensor.dim() == 3 else tensor


def stream(layer: Any) -> torch.Tensor:
    """The residual stream ``[rows, hidden]`` after a decoder layer."""
    value = layer.output
    return rows(value[0] + value[1] if isinstance(value, tuple) else value)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error by norm or by largest element, whichever is larger; infinite if the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    difference, scale = found.double() - expected.double(), expected.double()
    return float(max(difference.norm() / scale.norm(), difference.abs().max() / scale.abs().max()))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal within the contract's bound."""
    return error_of(found, expected) < BOUND


def tokens(tracer: Any) -> list[int]:
    """Token ids that a finished trace has generated, on either backend."""
    return result_tokens(tracer.result)


def result_tokens(result: Any) -> list[int]:
    """Token ids in a finished output of either backend."""
    return list(result.outputs[0].token_ids if hasattr(result, "outputs") else result.token_ids)


def prompt_ids(model: Any, prompt: str = PROMPT) -> list[int]:
    """Token ids of a prompt, on either backend."""
    tokenizer = model.tokenizer if hasattr(type(model), "tokenizer") else model._tokenizer
    return list(tokenizer(prompt)["input_ids"])


def shown(error: BaseException) -> str:
    """The error as Python prints it, with its traceback."""
    return "".join(traceback.format_exception(error))


def marked_line(filename: str, marker: str) -> int:
    """Number of the one line of a file that ends with the comment ``# <marker>``."""
    lines = Path(filename).read_text(encoding="utf-8").splitlines()
    (number,) = [at for at, text in enumerate(lines, 1) if text.rstrip().endswith(f"# <{marker}>")]
    return number


def assert_raised_at(error: BaseException, filename: str, marker: str) -> None:
    """Assert that the traceback has the marked line of the file, and that Python prints it."""
    line = marked_line(filename, marker)
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    assert (filename, line) in places, shown(error)
    assert f'File "{filename}", line {line}' in shown(error)


def assert_serves(model: Any, prompt: str = PROMPT, *, expected: str = " Paris") -> None:
    """Assert that a trace gives the right token and a right value: what comes after any trouble."""
    with model.trace(prompt, max_tokens=1, temperature=0) as tracer:
        lens = model.lm_head(first(model.model.norm.output))[..., -1, :].reshape(1, -1).save()
        logits = model.logits.save()
    tokenizer = model.tokenizer if hasattr(type(model), "tokenizer") else model._tokenizer
    assert tokenizer.decode(tokens(tracer)) == expected
    assert same(lens, logits)
