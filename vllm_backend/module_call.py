"""Calling one of the engine's modules on a block's own values: ``model.lm_head(h)``, ``model.model.norm(h)``."""

from __future__ import annotations

import torch

from .compat import ParallelLMHead


def call_module(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run a module; the output head, which vLLM never calls as a module, gives logits ``[..., vocab]``."""
    if isinstance(module, ParallelLMHead):
        return _head(module, *args, **kwargs)  # type: ignore[arg-type]
    return module(*args, **kwargs)


def _head(module: ParallelLMHead, hidden_states: torch.Tensor) -> torch.Tensor:
    logits = module.quant_method.apply(module, hidden_states, bias=module.bias)
    return logits[..., : module.org_vocab_size]
