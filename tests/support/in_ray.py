"""Engines whose workers are actors of Ray: whether they can be, and what processes need that start them."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from support.platforms import plugin_folder

NO_RAY = None if find_spec("ray") else "Ray is not installed: requirements/ray.txt"
"""Why no engine can have its workers in Ray; None if it can."""

_PLUGIN = "plugin"


def ray_folder() -> Path:
    """A new folder where Ray may write. Its path is short, since there are sockets in it."""
    return Path(tempfile.mkdtemp(prefix="ray-"))


def ray_environment(folder: Path) -> dict[str, str]:
    """The environment of processes whose engines start a Ray of their own, with two workers' devices."""
    setting = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else it writes one into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.01",  # engines do not use the store
        "RAY_worker_niceness": "0",  # it is 15, and whatever else runs goes first
    }
    if not torch.cuda.is_available():
        tests = Path(__file__).parents[1]
        paths = [str(tests), str(plugin_folder(folder / _PLUGIN, "ray_cpu")), os.environ.get("PYTHONPATH", "")]
        setting["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        setting["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 2, "GPU": 2})
    return setting


def prepare(folder: Path) -> None:
    """Have this process, which has not imported vLLM, start such engines."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(ray_environment(folder))
    sys.path.append(str(folder / _PLUGIN))
