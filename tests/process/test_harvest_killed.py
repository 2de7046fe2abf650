"""The command `invivo harvest`, killed in the middle, and run again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from invivo import Activations
from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.processes import start_script

pytestmark = pytest.mark.engine

PROMPTS = 500

SCRIPT = """
import os, sys, torch
os.environ |= {{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
torch._C.set_num_threads(1)
from invivo.vllm_backend.cli import main
sys.argv = ["invivo", *{arguments!r}]
main()
"""


def test_the_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    path, out = str(tiny_checkpoint("llama", tokenizer=smollm2_path())), tmp_path / "out"
    torch.manual_seed(0)
    prompts = [torch.randint(3, 49_000, (20 + at % 20,)).tolist() for at in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in prompts))
    arguments = ["harvest", path, str(tmp_path / "prompts.jsonl"), "--field", "ids", "--out", str(out)]
    arguments += ["--port", "sum(model.layers.*.output)", "--shard-size", "1", "--engine", "dtype=float32"]
    arguments += ["--engine", "max_model_len=128", "--engine", "kv_cache_memory_bytes=134217728"]

    first = start_script(tmp_path, SCRIPT, arguments=arguments)
    latest = time.monotonic() + 200
    while not list(out.glob("shard-*")) and time.monotonic() < latest and first.poll() is None:
        time.sleep(0.01)
    first.kill()
    first.communicate()
    killed = Activations(out)
    assert 0 < len(killed.prompts) < PROMPTS
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}

    second = start_script(tmp_path, SCRIPT, arguments=arguments)
    stdout, stderr = second.communicate(timeout=200)
    assert second.returncode == 0, stderr[-4000:]
    assert f"{sum(map(len, prompts)):,} rows of 3 columns from {PROMPTS:,} prompts" in stdout
    assert "tokens/s" in stderr
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}.items()
    assert not list(out.glob(".*.part"))
    rows: Any = Activations(out)
    assert rows.manifest.complete
    assert len(rows) == sum(map(len, prompts))
    assert all(rows.of_prompt(number)["token_id"].tolist() == ids for number, ids in enumerate(prompts))
