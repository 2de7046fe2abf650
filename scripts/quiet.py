"""Quiet for programs that show something: only what is wrong is said by vLLM, torch and the loaders of a model.

These libraries read their settings from the environment when they are imported, here and in the processes that they
start, so `quiet` comes first. invivo itself leaves the environment alone.
"""

from __future__ import annotations

import os
import warnings

SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_LOGS": "-all",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


def quiet() -> None:
    """Set what is not set already, for this process and its children."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=r"(torch|vllm|transformers)(\.|$)")
