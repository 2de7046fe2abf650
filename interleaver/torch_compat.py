"""Every private name of torch that invivo uses, in one place.

A port is served thousands of times a second, and the public ways of doing these things cost as much as everything else
together. Where a public name exists it is said beside the private one, so that a torch without the latter is a matter
of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

inference_mode = cast("Callable[[bool], AbstractContextManager[None]]", torch._C._InferenceMode)
"""As `torch.inference_mode`, which wraps this guard in a Python object of its own."""

set_grad_enabled = cast("Callable[[bool], None]", torch._C._set_grad_enabled)
"""As `torch.set_grad_enabled`, which also returns a context manager."""

version_of = cast("Callable[[torch.Tensor], int]", attrgetter("_version"))
"""How often a tensor was changed in place; only tensors that were made outside of inference mode count it."""


split_with_sizes_copy = cast(
    "Callable[[torch.Tensor, list[int], int], list[torch.Tensor]]", torch.split_with_sizes_copy
)
"""Pieces of a tensor along a dimension, each in a storage of its own. (Torch's annotations have it return nothing.)"""

copy_each = cast("Callable[..., None]", vars(torch)["_foreach_copy_"])
"""As `torch.Tensor.copy_` for each of some tensors, in one call."""


def _clone_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(tensors) == 1:
        return [tensors[0].clone()]
    made = [*map(torch.empty_like, tensors)]
    copy_each(made, tensors)
    return made


clone_each = cast("Callable[[list[torch.Tensor]], list[torch.Tensor]]", vars(torch).get("_foreach_clone", _clone_each))
"""As `torch.Tensor.clone` of each of some tensors, in one call where torch has one."""

gather_flat = cast(
    "Callable[..., object]",
    vars(torch.distributed).get("all_gather_single") or vars(torch.distributed)["all_gather_into_tensor"],
)
"""As `torch.distributed.all_gather`, into one tensor; the older of the two names is deprecated where both are."""

grad_on = torch.is_grad_enabled
default_dtype = torch.get_default_dtype

inference_on = torch.is_inference_mode_enabled
function_modes = torch._C._len_torch_function_stack
dispatch_modes = torch._C._len_torch_dispatch_stack
autocast_on = torch._C._is_any_autocast_enabled
"""These four tell which of the modes are on that torch keeps on stacks."""


innermost_transform = cast("Callable[[], object]", vars(torch._C)["_functorch"].peek_interpreter_stack)
"""The transform of `torch.func` that runs, or None."""


def modes_on() -> bool:
    """Whether anything stands between a call of torch and its kernels: modes, or transforms (`torch.func`)."""
    return bool(function_modes() or dispatch_modes() or innermost_transform() is not None)


@contextmanager
def without_modes() -> Iterator[None]:
    """None of these in this context."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), temporarily_clear_interpreter_stack():
        yield


def leave_modes(inference: bool, functions: int, dispatches: int, autocast: bool) -> None:
    """Bring the stacked modes back to what they were, by leaving what was entered since."""
    while dispatch_modes() > dispatches:
        mode: Any = _get_current_dispatch_mode_stack()[-1]
        mode.__exit__(None, None, None)
    while function_modes() > functions:
        mode = torch._C._pop_torch_function_stack()
        if isinstance(mode, _device.DeviceContext) and hasattr(mode, "old_device"):  # `torch.set_default_device`
            _device.CURRENT_DEVICE = mode.old_device
            vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
    if autocast_on() and not autocast:
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, False)
        while torch.autocast_decrement_nesting() > 0:
            pass
        torch.clear_autocast_cache()
    if inference_on() != inference:
        guard = inference_mode(inference)
        guard.__enter__()
        _guards.append(guard)


_guards: list[AbstractContextManager[None]] = []
"""Kept for good: a guard of inference mode that goes away puts back what there was before it."""


def output_hooks(module: torch.nn.Module) -> dict[Any, Any]:
    """Where `register_forward_hook` puts hooks, under a key and without a handle."""
    return module._forward_hooks


def input_hooks(module: torch.nn.Module) -> dict[Any, Any]:
    """Where `register_forward_pre_hook` puts hooks."""
    return module._forward_pre_hooks


def with_keywords(module: torch.nn.Module) -> dict[Any, Any]:
    """The keys of those `input_hooks` that get the keyword arguments too."""
    return module._forward_pre_hooks_with_kwargs
