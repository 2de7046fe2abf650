"""The only place that puts hooks on modules.

A module gets a hook when a block first asks for one of its ports, before or after its forward as the port is. Blocks
ask for the same ports in step after step, so hooks stay until no block runs. The modules around it get one too, because
torch decides at the beginning of a call whether a module has hooks at all: a block that is inside of a layer may ask
for that layer's output next, and a hook that comes later is called only if there was one before.

A module that hangs in several places of the tree (a rotary embedding that all layers share) has one address per place.
Which of them is running is told by which of the modules around them is open, so those are watched on both sides. Where
one module has it in several places, only a `Sequential` tells in which order it calls them; its calls are counted, so
all of them are watched as soon as something in it is. Elsewhere the first place stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ..envoy.address import INPUT, OUTPUT, Port, port_at
from .torch_compat import input_hooks, output_hooks, with_keywords

Fire = Callable[[Port, object], object]
_Tables: TypeAlias = "tuple[dict[Any, Any], ...]"
_Made: TypeAlias = "tuple[_Tables, Callable[..., object]]"


class Hooks:
    """Hooks on the modules of one model.

    Args:
        model: the model.
        fire: called with a port and what passes there; returns what to go on with, or None to leave it.

    Attributes:
        within: addresses of the modules that have others inside with hooks on them.
    """

    def __init__(self, model: torch.nn.Module, fire: Fire) -> None:
        self._fire = fire
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._places: dict[int, list[str]] = {}
        for address, module in self._modules.items():
            self._places.setdefault(id(module), []).append(address)
        self._around = {
            place: self._caller(place) for places in self._places.values() if len(places) > 1 for place in places
        }
        self._both = {address for pair in self._around.items() for address in pair}
        self._stands_for: dict[str, str] = {}
        self._repeated: dict[str, list[str]] = {}
        self._find_repeated()
        self._calls: dict[str, dict[int, int]] = {}
        self._made: dict[Port, _Made] = {}
        self._needed: dict[Port, tuple[Port, ...]] = {}
        self._on: dict[Port, _Tables] = {}
        self.within: set[str] = set()
        self._open: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of hooks that are on modules now."""
        return len(self._on)

    def module(self, address: str) -> torch.nn.Module:
        """The module at an address."""
        module: torch.nn.Module = self._modules[address]
        return module

    def watch(self, port: Port) -> None:
        """Have a port of a module fire from now on, until `clear`."""
        for needed in self._needed.get(port) or self._need(port):
            if needed in self._on:
                break  # and so are those that it needs, which come behind it
            self._put(needed)

    def watch_all(self) -> None:
        """Have the ports of every module fire from now on, until `clear`."""
        for address in self._modules:
            self._put(port_at(address, INPUT))
            self._put(port_at(address, OUTPUT))

    def clear(self) -> None:
        """Take all hooks off."""
        for tables in self._on.values():
            for table in tables:
                table.pop(self, None)
        self._on.clear()
        self.within.clear()
        self._open.clear()
        self._calls.clear()

    def fires_as(self, port: Port) -> Port:
        """The port that fires when the module of this one is called in its place: itself, but for repeated modules."""
        address = port.address
        around = address
        while around:
            if around in self._stands_for and f"{address}.".startswith(f"{around}."):
                address = self._stands_for[around] + address.removeprefix(around)
            around = _parent(around)
        return port if address == port.address else port_at(address, port.kind)

    def _need(self, port: Port) -> tuple[Port, ...]:
        """The ports that must fire for `port` to fire: itself, and what tells torch and `_address` of those around."""
        needed = [port]
        address = port.address
        if address in self._both:
            needed = [port_at(address, INPUT), port_at(address, OUTPUT)]
        needed += self._counted(address)
        while address:
            address = _parent(address)
            needed.append(port_at(address, OUTPUT))
            if address in self._both:
                needed.append(port_at(address, INPUT))
            needed += self._counted(address)
        self._needed[port] = tuple(needed)
        return self._needed[port]

    def _counted(self, address: str) -> list[Port]:
        """The ports by which the calls of the modules that a `Sequential` has in several places are counted."""
        found: list[Port] = []
        for place in self._repeated.get(address, ()):
            found += [port_at(place, INPUT), port_at(place, OUTPUT), *self._counted(place)]
        return found

    def _put(self, port: Port) -> None:
        tables, hook = self._made.get(port) or self._make(port)
        self._on[port] = tables
        self.within.add(_parent(port.address))
        for table in tables:
            table[self] = hook

    def _make(self, port: Port) -> _Made:
        """The hook of a port, and the tables of its module that it has to be in."""
        module = self._modules[port.address]
        made: _Made
        if port.kind == INPUT:
            made = (input_hooks(module), with_keywords(module)), self._before(port)
        else:
            made = (output_hooks(module),), self._after(port)
        self._made[port] = made
        return made

    def _before(self, port: Port) -> Callable[..., object]:
        """A hook that fires a port with the arguments of its module."""
        fire = self._fire
        if port.address not in self._both:
            return lambda module, args, kwargs: fire(port, (args, kwargs))

        def before(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            address = self._address(module)
            if address is None:
                return None
            self._open[address] = self._open.get(address, 0) + 1
            if address in self._repeated:
                self._calls[address] = {}
            return fire(port_at(address, INPUT), (args, kwargs))

        return before

    def _after(self, port: Port) -> Callable[..., object]:
        """A hook that fires a port with what its module returned."""
        fire = self._fire
        if port.address not in self._both:
            return lambda module, args, output: fire(port, output)

        def after(module: torch.nn.Module, args: tuple[object, ...], output: object) -> object:
            address = self._address(module)
            if address is None:
                return None
            self._open[address] = self._open.get(address, 1) - 1
            if (calls := self._calls.get(self._around.get(address, address))) is not None:
                calls[id(module)] = calls.get(id(module), 0) + 1
            return fire(port_at(address, OUTPUT), output)

        return after

    def _address(self, module: torch.nn.Module) -> str | None:
        """Where the module hangs; one that hangs in several places is told by the innermost of their callers that runs.

        Several places with one caller (an output head that is the embedding) are one module to it: the first stands
        for all, unless the caller calls them in their order.
        """
        places = self._places[id(module)]
        if len(places) == 1:
            return places[0]
        running = [place for place in places if self._open.get(self._around[place])]
        if not running:
            return None
        caller = max((self._around[place] for place in running), key=len)
        of_caller = [place for place in running if self._around[place] == caller]
        number = self._calls.get(caller, {}).get(id(module), 0)
        return of_caller[min(number, len(of_caller) - 1)]

    def _find_repeated(self) -> None:
        """The modules that one caller has in several places."""
        for places in self._places.values():
            by_caller: dict[str, list[str]] = {}
            for place in places if len(places) > 1 else ():
                by_caller.setdefault(self._around[place], []).append(place)
            for caller, (first, *others) in by_caller.items():
                if others and type(self._modules[caller]).forward is torch.nn.Sequential.forward:
                    self._repeated.setdefault(caller, []).append(first)
                else:
                    self._stands_for |= dict.fromkeys(others, first)

    def _caller(self, address: str) -> str:
        """The nearest module around `address` whose hooks run when it is called."""
        address = _parent(address)
        while address and not _called_as_module(self._modules[address]):
            address = _parent(address)
        return address


def _called_as_module(module: torch.nn.Module) -> bool:
    """Whether torch's own call runs the module: not for containers, nor where a class replaces `__call__`."""
    kind = type(module)
    return kind.__call__ is torch.nn.Module.__call__ and kind.forward is not torch.nn.Module.forward


def _parent(address: str) -> str:
    return address.rpartition(".")[0]
