"""Every private name of torch that invivo uses, in one place.

A port is served thousands of times a second, and the public ways of doing these things cost as much as everything else
together. Where a public name exists it is said beside the private one, so that a torch without the latter is a matter
of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

inference_mode = cast("Callable[[bool], AbstractContextManager[None]]", torch._C._InferenceMode)
"""As `torch.inference_mode`, which wraps this guard in a Python object of its own."""

set_grad_enabled = cast("Callable[[bool], None]", torch._C._set_grad_enabled)
"""As `torch.set_grad_enabled`, which also returns a context manager."""

version_of = cast("Callable[[torch.Tensor], int]", vars(torch._C.TensorBase)["_version"].__get__)
"""How often a tensor was changed in place; only tensors that were made outside of inference mode count it."""


def stacked_modes() -> tuple[bool, int, int, bool]:
    """The modes that torch keeps on stacks: inference mode, function modes, dispatch modes, autocast."""
    return _inference(), _functions(), _dispatches(), _autocast()


def leave_modes(inference: bool, functions: int, dispatches: int, autocast: bool) -> None:
    """Bring `stacked_modes` back to what it was, by leaving what was entered since."""
    while torch._C._len_torch_dispatch_stack() > dispatches:
        mode: Any = _get_current_dispatch_mode_stack()[-1]
        mode.__exit__(None, None, None)
    while torch._C._len_torch_function_stack() > functions:
        mode = torch._C._pop_torch_function_stack()
        if isinstance(mode, _device.DeviceContext) and hasattr(mode, "old_device"):  # `torch.set_default_device`
            _device.CURRENT_DEVICE = mode.old_device
            vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
    if _autocast() and not autocast:
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, False)
        while torch.autocast_decrement_nesting() > 0:
            pass
        torch.clear_autocast_cache()
    if _inference() != inference:
        guard = inference_mode(inference)
        guard.__enter__()
        _guards.append(guard)


_guards: list[AbstractContextManager[None]] = []
"""Kept for good: a guard of inference mode that goes away puts back what there was before it."""

_inference = torch.is_inference_mode_enabled
_functions = torch._C._len_torch_function_stack
_dispatches = torch._C._len_torch_dispatch_stack
_autocast = torch._C._is_any_autocast_enabled


def hook_input(module: torch.nn.Module, key: Any, hook: Callable[..., object]) -> None:
    """As `register_forward_pre_hook` with keyword arguments, under a key of one's own and without a handle."""
    module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_pre_hooks[key] = hook


def hook_output(module: torch.nn.Module, key: Any, hook: Callable[..., object]) -> None:
    """As `register_forward_hook`, under a key of one's own and without a handle."""
    module._forward_hooks[key] = hook


def unhook_input(module: torch.nn.Module, key: Any) -> None:
    """Take off what `hook_input` has put on."""
    module._forward_pre_hooks.pop(key, None)
    module._forward_pre_hooks_with_kwargs.pop(key, None)


def unhook_output(module: torch.nn.Module, key: Any) -> None:
    """Take off what `hook_output` has put on."""
    module._forward_hooks.pop(key, None)
