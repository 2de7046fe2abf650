"""The specification of a module tree: names, classes, and what was learned by running it once.

A `ModuleTree` is built from any object with `named_modules` (a real module or one on the meta device) and holds no
module and no tensor, so the caller can have one without weights. Order and shapes are unknown until a model that was
run once reports them (`Learned`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from .address import Port, join, port_at, shown, suggestion
from .errors import UnknownNameError

if TYPE_CHECKING:
    import torch


_PORTS = ("input", "inputs", "output")
_RUN_PORTS = ("logits", "samples")


class ModuleInfo(msgspec.Struct, frozen=True, array_like=True):
    """Class name and the names of the children, in order of definition; `sequence` if a number means a place there."""

    class_name: str
    children: tuple[str, ...]
    sequence: bool = False


class Learned(msgspec.Struct, frozen=True, array_like=True):
    """What one recorded forward shows.

    Attributes:
        order: ports in the order in which they fired; a module that ran twice is there twice.
        shapes: address to the shape of its output as text, ``n`` standing for the number of rows.
    """

    order: tuple[tuple[str, str], ...]
    shapes: dict[str, str]


class ModuleTree:
    """Names, classes, order and shapes of the modules of one model.

    Attributes:
        modules: name of the class and of the children, by address.
        shapes: shape of the output by address, as text; of the modules that ran, once learned.
        order: ports in the order in which they fire, once learned.
        places: places of each port in that order; of those that fired.
    """

    def __init__(self, modules: Mapping[str, ModuleInfo]) -> None:
        self.modules = dict(modules)
        self.shapes: dict[str, str] = {}
        self.order: tuple[Port, ...] = ()
        self.places: Mapping[Port, tuple[int, ...]] = {}
        self._numbered: dict[str, tuple[str, ...]] = {}
        self._learned: Learned | None = None

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleTree:
        """The tree of a torch module; a module that hangs in several places has several addresses."""
        return cls({address: _info(child) for address, child in module.named_modules(remove_duplicate=False)})

    def renew(self, modules: Mapping[str, ModuleInfo]) -> None:
        """Have other modules; what was learned is forgotten."""
        vars(self).update(vars(ModuleTree(modules)))

    def learn(self, learned: Learned) -> None:
        """Take over the order and shapes of a recorded forward."""
        if learned == self._learned:
            return
        self._learned = learned
        self.order = tuple(port_at(*port) for port in learned.order)
        self.shapes = dict(learned.shapes)
        places: dict[Port, list[int]] = {}
        for place, port in enumerate(self.order):
            places.setdefault(port, []).append(place)
        self.places = {port: tuple(found) for port, found in places.items()}

    def at(self, address: str) -> ModuleInfo:
        """What is at an address.

        Raises:
            UnknownNameError: nothing is, any more.
        """
        info = self.modules.get(address)
        if info is None:
            raise UnknownNameError(f"the model has no module `{address}` any more: it was replaced, or taken out.")
        return info

    def child(self, address: str, name: str) -> str:
        """Address of a child.

        Raises:
            UnknownNameError: there is none; the message has the nearest names.
        """
        info = self.at(address)
        if name in info.children:
            return join(address, name)
        raise UnknownNameError(
            f"{shown(address)} ({info.class_name}) has no module or port `{name}`."
            + suggestion(name, (*info.children, *_PORTS, *(() if address else _RUN_PORTS)))
        )

    def numbered(self, address: str) -> tuple[str, ...]:
        """The names of the children that numbers mean, from 0 on: all of a sequence, else those named 0 to n - 1."""
        found = self._numbered.get(address)
        if found is None:
            info = self.at(address)
            found = info.children
            if not info.sequence:
                digits = {name for name in info.children if name.isdigit()}
                numbers = tuple(map(str, range(len(digits))))
                found = numbers if digits == {*numbers} else ()
            self._numbered[address] = found
        return found

    def items(self, address: str) -> tuple[str, ...]:
        """The same, to go through.

        Raises:
            UnknownNameError: numbers mean none of its children.
        """
        numbered = self.numbered(address)
        if not numbered and self.at(address).children:
            raise UnknownNameError(self._not_numbered(address))
        return numbered

    def item(self, address: str, index: int) -> str:
        """Address of a child by number; negative numbers count from the end.

        Raises:
            UnknownNameError: the module has no numbered children, or fewer; the message has the valid range.
        """
        numbered = self.numbered(address)
        if not numbered:
            raise UnknownNameError(self._not_numbered(address))
        if not -len(numbered) <= index < len(numbered):
            raise UnknownNameError(
                f"{shown(address)}[{index}] does not exist: it has {len(numbered)} modules, "
                f"numbered 0 to {len(numbered) - 1} (or -{len(numbered)} to -1)."
            )
        return join(address, numbered[index])

    def _not_numbered(self, address: str) -> str:
        info = self.at(address)
        names = ", ".join(f'["{name}"]' for name in info.children[:12])
        instead = f" Use the names of those inside: {names}." if names else ""
        return f"{shown(address)} ({info.class_name}) has no numbered modules, from 0 on.{instead}"


def _info(module: torch.nn.Module) -> ModuleInfo:
    from torch.nn import Sequential  # whoever has a module has torch, and nobody else needs it here

    names = tuple(name for name, _ in _children(module))
    return ModuleInfo(type(module).__name__, names, isinstance(module, Sequential))


def _children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """All named children, also those that hang in several places (`named_children` drops repetitions)."""
    return [(name, child) for name, child in module._modules.items() if child is not None]
