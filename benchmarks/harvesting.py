"""What a harvest adds to computing its prompts, against copying as many bytes by the slower of memory and disk."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import invivo
from bench import LAYERS, WIDTH, Bench, PerRound, generate, wake
from measure import Figure, around, beside, less, over

PROMPTS, LENGTH = 32, 128
PORTS = "sum(model.layers.*.output)"
_SLICE = 8 << 20


def harvesting(bench: Bench) -> list[Figure]:
    """The figures; files go to the folder for temporary ones."""
    count = bench.tokens(PROMPTS)
    size = count * LENGTH * LAYERS * WIDTH * 4
    prompts = PerRound(lambda: bench.prompts(count, LENGTH), 4)
    eager, model = bench.eager, bench.model

    def plain() -> float:
        wake(eager)
        return generate(eager, prompts.take(), 1)

    def harvest() -> float:
        wake(bench.ready)
        with tempfile.TemporaryDirectory() as folder:
            given, began = prompts.take(), time.perf_counter()
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

    # The file is written when the engine has computed for as long as it has before a harvest's files are: pages that
    # were freed a moment ago are filled ten times faster than others on machines that lend them memory page by page.
    functions = around("plain eager", plain, {"harvest": harvest, "file": write})
    times = bench.alternate({**functions, "memcpy": copy}, 6)
    eagerly = beside(times, "plain eager", ["harvest", "file"])["harvest"]
    slower = [max(pair) for pair in zip(times["memcpy"], times["file"], strict=True)]
    megabytes = size / 1e6
    how = (
        f"{count} prompts of {LENGTH} tokens, the residual stream after all layers ({megabytes:.0f} MB in float32): "
        "`invivo.harvest` from call to data set, less `LLM.generate` of as many prompts on plain vLLM with "
        "`enforce_eager=True` right before and right after it, in copies of as many bytes in memory or writes of them "
        "to a file in a folder beside it, whichever takes longer; the file, too, is written between two runs of plain "
        "eager vLLM"
    )
    limits = "copies of the rows, their sums, and the disk, which is written to while the engine computes"
    return [
        Figure(
            "harvest, all that it adds",
            "copies",
            over(less(times["harvest"], eagerly), slower),
            2.0,
            how,
            limits,
        ),
        Figure("harvest", "x", over(eagerly, times["harvest"]), None, "plain prefill over the harvest"),
        Figure("copy in memory", "MB/s", [megabytes / one for one in times["memcpy"]], None, "for comparison"),
        Figure("write to a file", "MB/s", [megabytes / one for one in times["file"]], None, "the same; no fsync"),
    ]
