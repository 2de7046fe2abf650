"""Layers that stay compiled in an engine step that runs module by module.

A step in which a block waits for a module cannot use vLLM's compiled model, which is one piece. Most of its layers
have nobody inside, though: a block that reads the residual stream waits at a layer's edge. So when an engine that
compiles warms up, its layers are compiled by themselves too, and such a step runs those in which no hook is. Whether
one is, is asked when the layer is called, as blocks come to modules on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .compat import TorchCompileWithNoGuardsWrapper
from .compiled_kind import CompiledKind

if TYPE_CHECKING:
    from .compat import VllmConfig

Met: TypeAlias = "Callable[[str], bool]"
"""Whether what is inside of the module at an address may be met, or runs for somebody else than the model."""

_Forward: TypeAlias = "Callable[..., Any]"

_MOST_KINDS = 8
"""Kinds of layers that are compiled for one model; each takes seconds."""

_log = logging.getLogger(__name__)


class Layers:
    """The layers of one model that can run compiled by themselves: none before `compile`.

    Args:
        model: the loaded model.
        config: its engine's.
    """

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self._model, self._settings = model, config.compilation_config
        self._kinds: list[CompiledKind] = []
        self._failed: dict[type[torch.nn.Module], Exception] = {}
        self._on: list[tuple[dict[str, Any], _Forward]] = []
        self._met: Met = _everywhere

    def __len__(self) -> int:
        """Number of layers that are compiled."""
        return len(self._on)

    def compile(self, forward: Callable[[], object]) -> None:
        """Compile the layers. Those that the compiler does not take stay as they are, with a warning.

        Args:
            forward: runs the model on `compiled_kind.ROWS` rows.
        """
        began = monotonic()
        compiled: list[Any] = [
            module
            for module in self._model.modules()
            if isinstance(module, TorchCompileWithNoGuardsWrapper) and not module.do_not_compile
        ]
        if self._settings.backend != "inductor" or not (found := layers_of(self._model, compiled)):
            return
        for model in compiled:
            model.do_not_compile = True
        for address, layer in found.items():
            vars(layer)["forward"] = self._first(address, layer)
        try:
            forward()
        finally:
            for layer in found.values():
                vars(layer).pop("forward", None)
            for model in compiled:
                model.do_not_compile = False
        for kind in self._kinds:
            kind.settle()
        _log.info("compiled %d layers by themselves in %.1f s", len(self), monotonic() - began)
        for failed, why in self._failed.items():
            _log.warning("%s runs module by module in steps that meet modules: %r", failed.__name__, why)

    @contextmanager
    def on(self, met: Met) -> Iterator[None]:
        """Layers run compiled in this context, but where `met` says that they cannot."""
        self._met = met
        for table, forward in self._on:
            table["forward"] = forward
        try:
            yield
        finally:
            for table, _ in self._on:
                del table["forward"]
            self._met = _everywhere

    def _first(self, address: str, layer: torch.nn.Module) -> _Forward:
        """Runs a layer that is called for the first time."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            del vars(layer)["forward"]  # guards look at what a layer has
            if type(layer) not in self._failed:
                try:
                    kind = self._kind(layer, args, kwargs)
                    output = kind.run(layer, *args, **kwargs)
                except Exception as error:
                    self._failed[type(layer)] = error
                else:
                    self._on.append((vars(layer), self._later(address, layer, kind)))
                    return output
            return layer.forward(*args, **kwargs)

        return forward

    def _kind(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledKind:
        for kind in self._kinds:
            if kind.holds_for(layer, args, kwargs):
                return kind
        if len(self._kinds) == _MOST_KINDS:
            raise ValueError(f"there are {_MOST_KINDS} other kinds of layers already")
        self._kinds.append(CompiledKind(layer, args, kwargs, self._settings.inductor_compile_config))
        return self._kinds[-1]

    def _later(self, address: str, layer: torch.nn.Module, kind: CompiledKind) -> _Forward:
        """Runs a layer in a step that meets modules."""
        eager, fits, run = layer.forward, kind.fits, kind.run

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._met(address) or not fits(args, kwargs):
                return eager(*args, **kwargs)
            return run(layer, *args, **kwargs)

        return forward


def layers_of(model: torch.nn.Module, compiled: Iterable[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The outermost modules in lists of modules of what vLLM compiles, by address, but those with several addresses."""
    addresses: dict[int, list[str]] = {}
    for address, module in model.named_modules(remove_duplicate=False):
        addresses.setdefault(id(module), []).append(address)
    found: dict[str, torch.nn.Module] = {}
    for inside in compiled:
        lists = [module for module in inside.modules() if isinstance(module, torch.nn.ModuleList)]
        within = {id(deep) for one in lists for entry in one for deep in entry.modules() if deep is not entry}
        for entry in (entry for one in lists for entry in one):
            places = addresses[id(entry)]
            if id(entry) not in within and len(places) == 1 and "forward" not in vars(entry):
                found[places[0]] = entry
    return found


def _everywhere(address: str) -> bool:
    return True
