"""Envoys: the stand-ins for a model's modules.

An Envoy is an address in a tree and nothing more. Inside a block its ports read and write the running model; outside,
it can be looked at, indexed and iterated over. `RootEnvoy` adds the run-level ports, and is what models derive from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Self, overload

from . import active
from .address import INPUT, LOGITS, OUTPUT, SAMPLES, Port, port_at, shown, suggestion
from .errors import ForeignError, UnknownNameError
from .render import tree_html, tree_text
from .tree import Learned, ModuleTree

_PORTS = ("input", "inputs", "output")


class Envoy:
    """One module of the model, by its address.

    Children are attributes (``model.model``) or items (``layers[5]``, ``layers[-1]``, ``layers[2:4]``); a child whose
    name is taken (``output``) or begins with an underscore is reached as ``envoy["output"]``.
    """

    _tree: ModuleTree
    _address: str
    _root: Envoy
    _known: dict[int | str, Any]
    """Children by number, once they were asked for; under an asterisk all of them, and their names."""
    _port: Port

    def __init__(self, tree: ModuleTree, address: str, root: Envoy | None = None) -> None:
        root, port = root if root is not None else self, port_at(address, OUTPUT)
        vars(self).update(_tree=tree, _address=address, _root=root, _known={}, _port=port)

    @property
    def address(self) -> str:
        """Dotted path of the module; ``""`` is the whole model."""
        return self._address

    @property
    def root(self) -> Envoy:
        """The Envoy of the whole model."""
        return self._root

    @property
    def output(self) -> Any:
        """What the module returned, for this request's rows: a private copy, in the module's own structure.

        Tensors have shape ``[rows, ...]`` (one row per token of this step), and the model's device and dtype. In-place
        edits and assignments are what the model goes on with.

        Raises:
            PortPassedError: the model is past this port in this step.
            PortNotReachedError: the module did not run in this step.
            WriteError: on assignment of another structure, shape or dtype.
        """
        session = active.current()
        if session is None or session.tree is not self._tree:
            session = self._session("output")  # raises
        try:
            return session.read(self._port, "output")
        except AttributeError as error:
            self._raised = error
            raise

    @output.setter
    def output(self, value: object) -> None:
        self._write(OUTPUT, "output", value)

    def _item(self, index: int) -> Any:
        """``output[index]``."""
        session = active.current()
        if session is None or session.tree is not self._tree:
            session = self._session("output")  # raises
        return session.read_item(self._port, index)

    @property
    def input(self) -> Any:
        """The first floating-point tensor among the arguments (else the first argument), as `output` is read.

        Position ids and token ids come first in many modules of vLLM; they are in `inputs`.
        """
        return self._read(INPUT, "input")

    @input.setter
    def input(self, value: object) -> None:
        self._write(INPUT, "input", value)

    @property
    def inputs(self) -> Any:
        """All arguments, ``(args, kwargs)``: a tuple and a dict, read and written like `output`."""
        return self._read(INPUT, "inputs")

    @inputs.setter
    def inputs(self, value: object) -> None:
        self._write(INPUT, "inputs", value)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the real module, with the real weights, on values of the block (``model.model.norm(h)``)."""
        return self._session().call(self._address, args, kwargs)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it stands for a module, and is no data of the block

    def __getattr__(self, name: str) -> Envoy:
        if name.startswith("_"):
            self._refuse(name)
        raised = vars(self).pop("_raised", None)  # by a port: to Python that means that there is no such name
        if raised is not None and name in self._writable():
            raise raised
        child = Envoy(self._tree, self._tree.child(self._address, name), self._root)
        vars(self)[name] = child  # found there next time, without coming by here
        return child

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_") or name in self._writable():
            super().__setattr__(name, value)
            return
        self.check_writable(name)

    def check_writable(self, name: str) -> None:
        """Raise `UnknownNameError` if this Envoy has no port `name` that could be assigned to."""
        known = self._writable()
        if name not in known:
            raise UnknownNameError(f"{shown(self._address)} has no port `{name}` to write to.{suggestion(name, known)}")

    @overload
    def __getitem__(self, key: int | str) -> Envoy: ...
    @overload
    def __getitem__(self, key: slice) -> list[Envoy]: ...
    def __getitem__(self, key: int | str | slice) -> Envoy | list[Envoy]:
        if isinstance(key, slice):
            return [self[index] for index in range(*key.indices(len(self._tree.items(self._address))))]
        if isinstance(key, str):
            return Envoy(self._tree, self._tree.child(self._address, key), self._root)
        child = self._known.get(key) if type(key) is int else None
        if child is None:
            child = Envoy(self._tree, self._tree.item(self._address, key), self._root)
            if type(key) is int:
                self._known[key] = child
        return child

    def __len__(self) -> int:
        return len(self._tree.numbered(self._address))

    def __iter__(self) -> Iterator[Envoy]:
        names = self._tree.items(self._address)
        known = self._known.get("*")
        if known is None or known[0] is not names:
            known = self._known["*"] = names, [self[index] for index in range(len(names))]
        return iter(known[1])

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Envoy):
            return NotImplemented
        return self._tree is other._tree and self._address == other._address

    def __hash__(self) -> int:
        return hash((id(self._tree), self._address))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.modules[self._address].children]

    def __repr__(self) -> str:
        return tree_text(self._tree, self._address)

    def _repr_html_(self) -> str:
        return tree_html(self._tree, self._address)

    def _refuse(self, name: str) -> NoReturn:
        """Names that begin with an underscore are the Envoy's own."""
        tree = vars(self).get("_tree")
        if tree is not None and name in tree.at(self._address).children:
            raise UnknownNameError(
                f"{shown(self._address)} has a module `{name}`, which is no attribute here, since names that begin "
                f'with an underscore are invivo\'s own. Write `["{name}"]`.'
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _writable(self) -> tuple[str, ...]:
        return _PORTS

    def _session(self, port: str = "") -> active.Session:
        """The running block, which must be one of this model; `port` is what is asked for (none: a call)."""
        session = active.current()
        if session is None or session.tree is not self._tree:
            name = f"`{self._address or 'model'}{f'.{port}' if port else '()'}`"
            active.session(name)
            raise ForeignError(
                f"{name} belongs to another model than the one that this block runs in. "
                "Trace that model in a `with` of its own and hand over saved values."
            )
        return session

    def _read(self, kind: str, part: str) -> Any:
        session = active.current()
        if session is None or session.tree is not self._tree:
            session = self._session(part)  # raises
        try:
            return session.read(port_at(self._address, kind), part)
        except AttributeError as error:
            self._raised = error
            raise

    def _write(self, kind: str, part: str, value: object) -> None:
        self._session(part).write(port_at(self._address, kind), part, value)


def output_item(of: Any, index: int) -> Any:
    """What ``of.output[index]`` becomes in the body of a block (`tracer.program`).

    Layers return several tensors, and most blocks look at the first one.
    """
    return of._item(index) if type(of) is Envoy else of.output[index]


class RootEnvoy(Envoy):
    """The Envoy of the whole model, with the ports of a generation step."""

    @property
    def logits(self) -> Any:
        """Logits of the token that this step generates, ``[1, vocab]``, before sampling; readable and writable."""
        return self._read(LOGITS, "logits")

    @logits.setter
    def logits(self, value: object) -> None:
        self._write(LOGITS, "logits", value)

    @property
    def samples(self) -> Any:
        """Id of the token that this step generates, integer tensor ``[1]``.

        Writing it (an int, or a tensor of one element) changes what is generated.
        """
        return self._read(SAMPLES, "samples")

    @samples.setter
    def samples(self, value: object) -> None:
        self._write(SAMPLES, "samples", value)

    def learn(self, learned: Learned) -> None:
        """Take over the execution order and the shapes that the running model has reported."""
        self._tree.learn(learned)

    def _writable(self) -> tuple[str, ...]:
        return (*_PORTS, "logits", "samples")
