"""A platform plugin for vLLM: Model Runner V2 on a CPU, for tests in processes of their own.

vLLM has a V2 runner for CPUs, which needs a Triton that compiles for them. Triton's interpreter, which runs kernels in
numpy, does as well: `TRITON_INTERPRET=1`, and this platform. Asynchronous scheduling is left on, see `async_cpu`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._triton

from support import async_cpu


def platform() -> str:
    """The entry point: every process of an engine comes by here."""
    assert os.environ["TRITON_INTERPRET"] == "1", "without a compiler for CPUs"
    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))
    torch.utils._triton.triton_hash_with_backend = lambda: "cpu"  # torch's own compiler asks for it
    cuda: Any = torch.cuda
    cuda.set_stream = lambda stream: None
    return async_cpu.platform()
