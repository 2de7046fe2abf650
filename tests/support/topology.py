"""Engines of several workers for the tests: how they are started."""

from __future__ import annotations

from typing import Any

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ray": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    "raypp2": {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}
"""Engine arguments by the name that pytest's ``--topology`` takes."""


def engines(name: str) -> set[str]:
    """The fixtures of engines that can be started so: vLLM has several engines for asynchronous callers only."""
    return {"async_smollm2"} if "data_parallel_size" in TOPOLOGIES[name] else {"smollm2", "async_smollm2"}
