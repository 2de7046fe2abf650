"""A platform plugin for vLLM: Model Runner V2 on a CPU, for tests in processes of their own.

vLLM has a V2 runner for CPUs, which needs a Triton that compiles for them. Triton's interpreter, which runs kernels in
numpy, does as well: `TRITON_INTERPRET=1`, and this platform. Asynchronous scheduling is left on, see `async_cpu`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from support import async_cpu


class _Device:
    """Of a stream."""

    type = "cpu"


def platform() -> str:
    """The entry point: every process of an engine comes by here."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))
    cuda: Any = torch.cuda
    cuda.set_stream = lambda stream: None
    return async_cpu.platform()
