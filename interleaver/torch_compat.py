"""Every private name of torch that invivo uses, in one place.

A port is served thousands of times a second, and the public ways of doing these things cost as much as everything else
together. Where a public name exists it is said beside the private one, so that a torch without the latter is a matter
of this file.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch

inference_mode = cast("Callable[[bool], AbstractContextManager[None]]", torch._C._InferenceMode)
"""As `torch.inference_mode`, which wraps this guard in a Python object of its own."""

set_grad_enabled = cast("Callable[[bool], None]", torch._C._set_grad_enabled)
"""As `torch.set_grad_enabled`, which also returns a context manager."""

version_of = cast("Callable[[torch.Tensor], int]", vars(torch._C.TensorBase)["_version"].__get__)
"""How often a tensor was changed in place; only tensors that were made outside of inference mode count it."""


class Stacked(NamedTuple):
    """The modes that torch keeps on stacks: whether or how many are open."""

    inference: bool
    functions: int
    dispatches: int
    autocast: bool


def stacked_modes() -> Stacked:
    """The modes that are open now."""
    return Stacked(
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_any_autocast_enabled(),
    )


def hook_input(module: torch.nn.Module, key: Any, hook: Callable[..., object]) -> None:
    """As `register_forward_pre_hook` with keyword arguments, under a key of one's own and without a handle."""
    module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_pre_hooks[key] = hook


def hook_output(module: torch.nn.Module, key: Any, hook: Callable[..., object]) -> None:
    """As `register_forward_hook`, under a key of one's own and without a handle."""
    module._forward_hooks[key] = hook


def unhook(module: torch.nn.Module, key: Any) -> None:
    """Take off what the two functions above have put on."""
    tables: tuple[MutableMapping[Any, Any], ...] = (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
    )
    for table in tables:
        table.pop(key, None)
