"""Engines of several workers for the tests: how they are started, and a SmolLM2 that can be split between two.

SmolLM2 has nine heads. `even_smollm2` is the same function with twelve: three query heads and one key-value head more,
whose part of the output projection is zero.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from smollm2 import smollm2_path
from support.checkpoints import default_folder

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ray": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    "raypp2": {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
"""Engine arguments by the name that pytest's ``--topology`` takes."""


def even_smollm2() -> Path:
    """The folder of the checkpoint; the first call makes it."""
    target = default_folder() / "smollm2-12-heads"
    if target.exists():
        return target
    from transformers import AutoModelForCausalLM

    source = smollm2_path()
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    config.head_dim = width = config.hidden_size // config.num_attention_heads
    config.num_attention_heads, config.num_key_value_heads = 12, 4
    state = model.state_dict()
    for name, value in list(state.items()):
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            rows = (12 if part == "q_proj" else 4) * width
            state[name] = torch.cat([value, 0.1 * torch.ones(rows - len(value), value.shape[1])])
        elif part == "o_proj":
            state[name] = torch.cat([value, torch.zeros(len(value), 12 * width - value.shape[1])], 1)
    even: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    even.load_state_dict(state)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    even.save_pretrained(made)
    for file in source.iterdir():
        if not (made / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, made / file.name)
    try:
        made.rename(target)
    except OSError:
        shutil.rmtree(made)
        if not target.exists():  # else another process was faster
            raise
    return target
