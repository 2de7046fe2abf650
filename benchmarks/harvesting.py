"""What a harvest adds to computing its prompts, against copying as many bytes by the slower of memory and disk."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import invivo
from measure import Figure, alternate

PROMPTS, TOKENS = 32, 128
PORTS = "sum(model.layers.*.output)"
_SLICE = 8 << 20


def harvesting(model: Any, rounds: int) -> list[Figure]:
    """The figures, on an engine that runs. Files go to the folder for temporary ones."""
    layers, width = len(model.model.layers), 576
    size = PROMPTS * TOKENS * layers * width * 4
    generator = torch.Generator().manual_seed(0)

    def prompts() -> list[list[int]]:  # new ones each time: the prefix cache would know the others
        return torch.randint(3, 49_000, (PROMPTS, TOKENS), generator=generator).tolist()

    def plain() -> float:
        given, began = prompts(), time.perf_counter()
        model.generate(given, max_tokens=1, temperature=0, use_tqdm=False)
        return time.perf_counter() - began

    def harvest() -> float:
        with tempfile.TemporaryDirectory() as folder:
            given, began = prompts(), time.perf_counter()
            invivo.harvest(model, given, PORTS, folder, progress=False)
            return time.perf_counter() - began

    source, target = torch.ones(size // 4), torch.ones(size // 4)

    def copy() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    def write() -> float:
        array: Any = source.numpy()
        data = memoryview(array).cast("B")
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            file = os.open(Path(folder) / "file", os.O_CREAT | os.O_WRONLY)
            for start in range(0, size, _SLICE):
                os.write(file, data[start : start + _SLICE])
            os.close(file)
            return time.perf_counter() - began

    times = alternate({"plain": plain, "harvest": harvest, "copy": copy, "write": write}, rounds, warm=1)
    rows = list(zip(times["plain"], times["harvest"], times["copy"], times["write"], strict=True))
    megabytes = size / 1e6
    how = (
        f"{PROMPTS} prompts of {TOKENS} tokens, the residual stream after all layers ({megabytes:.0f} MB in float32): "
        "`invivo.harvest` from call to data set, less `model.generate` of as many prompts in the same round, over "
        "copying as many bytes in memory or writing them to a file in the same folder, whichever takes longer"
    )
    extra = [(harvested - alone) / max(copied, written) for alone, harvested, copied, written in rows]
    return [
        Figure("harvest / copy of its bytes", "x", extra, 2.0, how),
        Figure("prefill / harvest", "x", [a / b for a, b, *_ in rows], None, "the same without the difference"),
        Figure("harvest", "MB/s", [megabytes / b for _, b, *_ in rows], None, "bytes of activations over all of it"),
        Figure("copy in memory", "MB/s", [megabytes / c for _, _, c, _ in rows], None, "for comparison"),
        Figure("write to a file", "MB/s", [megabytes / d for *_, d in rows], None, "for comparison, without fsync"),
    ]
