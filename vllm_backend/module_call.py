"""Calling one of the engine's modules on a block's own values: ``model.lm_head(h)``, ``model.model.norm(h)``."""

from __future__ import annotations

import torch

from ..envoy.errors import UnsupportedError
from .compat import AttentionLayerBase, ParallelLMHead, get_tp_group


def call_module(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run a module; the output head, which vLLM never calls as a module, gives logits ``[..., vocab]``.

    Raises:
        UnsupportedError: the module is attention, or has it inside: it would write the engine's key-value cache.
    """
    if any(isinstance(inside, AttentionLayerBase) for inside in module.modules()):
        raise UnsupportedError(
            f"a {type(module).__name__} cannot be called in a block: it has attention inside, which reads and writes "
            "the key-value cache of the requests that are running. Call the parts that have none (norms, MLPs, "
            "projections, the head)."
        )
    if isinstance(module, ParallelLMHead):
        return _head(module, *args, **kwargs)  # type: ignore[arg-type]
    return module(*args, **kwargs)


def _head(module: ParallelLMHead, hidden_states: torch.Tensor) -> torch.Tensor:
    logits = module.quant_method.apply(module, hidden_states, bias=module.bias)
    group = get_tp_group()
    if group.world_size > 1:  # each rank has the logits of some tokens
        logits = group.all_gather(logits, dim=-1)
    return logits[..., : module.org_vocab_size]
