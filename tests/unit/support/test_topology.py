"""Where an engine of several workers cannot be started, its tests say why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support import in_ray
from support.topology import TOPOLOGIES, cache, engines, obstacle, workers


def test_how_many_workers_there_are() -> None:
    assert {name: workers(name) for name in TOPOLOGIES} == {name: 4 if name == "tp2pp2" else 2 for name in TOPOLOGIES}
    assert {name: cache(name)["kv_cache_memory_bytes"] >> 20 for name in ("tp2", "tp2pp2", "dp2")} == {
        "tp2": 512,
        "tp2pp2": 256,
        "dp2": 1024,
    }
    assert engines("dp2") == {"async_smollm2"} < engines("tp2")


def test_no_ray_and_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(in_ray, "NO_RAY", None)
    assert not any(map(obstacle, TOPOLOGIES))
    monkeypatch.setattr(in_ray, "NO_RAY", "Ray is not installed")
    assert {name for name in TOPOLOGIES if obstacle(name)} == {"ray", "raypp2"}


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert obstacle("tp2") is None
    assert obstacle("tp2pp2") == "tp2pp2 has 4 workers with a GPU each, and this machine has 2"


def test_make_runs_all() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text(encoding="utf-8")
    (found,) = re.findall(r"^TOPOLOGIES \?= (.*)$", makefile, re.MULTILINE)
    assert found.split() == list(TOPOLOGIES)
