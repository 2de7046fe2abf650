"""One engine step without the compiled model.

Modules that are compiled into one piece cannot be met. Where a block waits for one, that engine step runs module by
module: vLLM's models look at `skip_compiled` of the forward context (`vllm/compilation/decorators.py`).

Layers for which vLLM has kernels of its own run in plain torch in an engine that compiles, since the compiler fuses
them with what is around (`CustomOp` in `vllm/model_executor/custom_op.py`, and `vllm/ir`, whose operations have several
implementations). Module by module that is slow: a fifth of a step of a small model. So in such a step they run the
kernels that they would run in an eager engine. Whole layers in which nobody is met stay compiled, see `layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from .compat import (
    CompilationMode,
    CustomOp,
    current_platform,
    enable_torch_wrap,
    get_forward_context,
    set_current_vllm_config,
)
from .layers import Layers

if TYPE_CHECKING:
    from .compat import IrOpPriorityConfig, VllmConfig
    from .layers import Met

_Forward = Callable[..., Any]


class EagerSteps:
    """Runs single engine steps of one model eagerly.

    Args:
        model: the loaded model.
        config: its engine's.

    Attributes:
        layers: those that may stay compiled.
    """

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        unwanted = {setting for setting in config.compilation_config.custom_ops if setting.startswith("-")}
        with set_current_vllm_config(config):
            self._kernels: list[tuple[CustomOp, _Forward, _Forward]] = [
                (layer, layer._forward_method, _kernel(layer))
                for layer in model.modules()
                if isinstance(layer, CustomOp) and not layer.enabled() and f"-{_name(layer)}" not in unwanted
            ]
        self._operations = _operations(config)
        self.layers = Layers(model, config)

    @contextmanager
    def step(self, met: Met) -> Iterator[None]:
        """The forward in this context runs module by module, but for layers in which nothing is `met`."""
        context = get_forward_context()
        before, context.skip_compiled = context.skip_compiled, True
        for layer, _, kernel in self._kernels:
            vars(layer)["_forward_method"] = kernel  # a module's own way to set it takes a microsecond for each
        try:
            with enable_torch_wrap(False), self._operations.set_priority(), self.layers.on(met):
                yield
        finally:
            for layer, compiled, _ in self._kernels:
                vars(layer)["_forward_method"] = compiled
            context.skip_compiled = before


def _name(layer: CustomOp) -> str:
    """What settings call this kind of layer; empty where it was not registered."""
    return getattr(layer, "name", "")


def _operations(config: VllmConfig) -> IrOpPriorityConfig:
    """Which implementations an eager engine prefers, where the user has not chosen others."""
    eager = copy(config)
    eager.compilation_config = copy(config.compilation_config)
    eager.compilation_config.mode = CompilationMode.NONE
    compiled = current_platform.get_default_ir_op_priority(config)
    plain = current_platform.get_default_ir_op_priority(eager)
    chosen = copy(config.kernel_config.ir_op_priority)
    for field in fields(chosen):
        if getattr(chosen, field.name) == getattr(compiled, field.name):
            setattr(chosen, field.name, getattr(plain, field.name))
    return chosen


def _kernel(layer: CustomOp) -> _Forward:
    """What the layer runs in an eager engine."""
    before, layer._enforce_enable = layer._enforce_enable, True
    try:
        kernel: _Forward = layer.dispatch_forward(compile_native=False)
    finally:
        layer._enforce_enable = before
    return kernel
