"""Engines of several workers for the tests: how they are started, and where they cannot be."""

from __future__ import annotations

from math import prod
from typing import Any

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "ray": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    "raypp2": {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
}
"""Engine arguments by the name that pytest's ``--topology`` takes."""


def engines(name: str) -> set[str]:
    """The fixtures of engines that can be started so: vLLM has several engines for asynchronous callers only."""
    return {"async_smollm2"} if "data_parallel_size" in TOPOLOGIES[name] else {"smollm2", "async_smollm2"}


def workers(name: str) -> int:
    """How many workers an engine of this topology has; where there are several engines, all of theirs."""
    return prod(value for argument, value in TOPOLOGIES[name].items() if argument.endswith("_parallel_size"))


def cache(name: str) -> dict[str, Any]:
    """The key-value cache of each worker: a model's workers together have as much as the one of an engine of one."""
    from support.contract import ENGINE

    engines_together = TOPOLOGIES[name].get("data_parallel_size", 1)
    return {"kv_cache_memory_bytes": ENGINE["kv_cache_memory_bytes"] * engines_together // workers(name)}


def obstacle(name: str) -> str | None:
    """Why no engine of this topology can be started here; None if one can."""
    import torch

    from support.in_ray import NO_RAY

    if in_ray(name) and NO_RAY is not None:
        return NO_RAY
    needed, found = workers(name), torch.cuda.device_count()
    if torch.cuda.is_available() and found < needed:
        return f"{name} has {needed} workers with a GPU each, and this machine has {found}"
    return None


def in_ray(name: str) -> bool:
    """Whether the workers are actors of Ray."""
    return TOPOLOGIES[name].get("distributed_executor_backend") == "ray"
