"""Engines of several workers for the tests: how they are started, and a SmolLM2 that can be split between two.

SmolLM2 has nine heads. `even_smollm2` is the same function with twelve: three query heads and one key-value head more,
whose part of the output projection is zero.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from smollm2 import smollm2_path
from support.checkpoints import default_folder
from support.platforms import plugin_folder

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ray": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    "raypp2": {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
}
"""Engine arguments by the name that pytest's ``--topology`` takes."""


NO_RAY = None if find_spec("ray") else "Ray is not installed: requirements/ray.txt"
"""Why no engine can have its workers in Ray; None if it can."""


def ray_environment(folder: Path) -> dict[str, str]:
    """The environment of processes whose engines start a Ray of their own, with two workers' devices.

    Args:
        folder: where Ray may write; a short path, since there are sockets in it.
    """
    setting = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else it writes one into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.01",  # engines do not use the store
    }
    if not torch.cuda.is_available():
        tests = Path(__file__).parents[1]
        paths = [str(tests), str(plugin_folder(folder / "plugin", "ray_cpu")), os.environ.get("PYTHONPATH", "")]
        setting["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        setting["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 2, "GPU": 2})
    return setting


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
