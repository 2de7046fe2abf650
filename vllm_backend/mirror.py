"""The module tree of a model, without its weights and without an engine.

vLLM's own model classes are built on the meta device in this process, for one rank, so names and whole shapes are
those that a worker has. Nothing of it stays: not the model, not the process groups that vLLM's layers ask for, and not
the rotary embeddings that vLLM keeps for a whole process, which an engine in this process would find without data.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..envoy.tree import ModuleTree
from .compat import (
    ROTARY_EMBEDDINGS,
    VllmConfig,
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model,
    initialize_model_parallel,
    model_parallel_is_initialized,
    set_current_vllm_config,
)


def mirror(config: VllmConfig) -> ModuleTree:
    """Build the tree of the model that `config` describes.

    Takes about a second, mostly for the Python objects of the modules.
    """
    dtype = torch.get_default_dtype()
    known = set(ROTARY_EMBEDDINGS)
    with set_current_vllm_config(config), _one_rank(), _all_layers():
        try:
            torch.set_default_dtype(config.model_config.dtype)
            with torch.device("meta"):
                model = initialize_model(config)
            return ModuleTree.of(model)
        finally:
            torch.set_default_dtype(dtype)
            for key in set(ROTARY_EMBEDDINGS) - known:
                del ROTARY_EMBEDDINGS[key]


@contextmanager
def _one_rank() -> Iterator[None]:
    """The process groups that vLLM's layers ask for. An engine in this process has them, and goes on with them."""
    if model_parallel_is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'rendezvous'}", 0, "gloo")
        try:
            initialize_model_parallel(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


@contextmanager
def _all_layers() -> Iterator[None]:
    """Without the setting that says how many layers each stage of a pipeline has: here there is one."""
    name = "VLLM_PP_LAYER_PARTITION"
    given = os.environ.pop(name, None)
    try:
        yield
    finally:
        if given is not None:
            os.environ[name] = given
