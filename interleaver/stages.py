"""A model whose layers are in several processes, one after the other (pipeline stages): all run the same blocks.

What a stage does not have, it is told. Behind its part of a forward it tells the next one what its blocks have read;
there they run over the same reads again, as far as these go, and then meet the modules of that stage. A block that asks
for a port of a later stage has met all it can meet in this stage and step: it waits, and is told what the later stages
have read when its next step begins. So each stage sees each read once, in the same order, and the last one sees all of
it first: from there saves go home.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch

from ..envoy.address import Port, port_at
from ..envoy.errors import PortPassedError, RanksError, UnsupportedError
from ..envoy.tree import Learned, ModuleInfo, ModuleTree
from ..tracer.failure import Failure, describe, rebuild
from .shards import checksum
from .structure import map_tensors

CALL = "call"
"""The kind of what stands for a port where a block calls a module."""

ABSENT = "PPMissingLayer"
"""The class of what a stage has in place of a module of another one."""


@dataclass
class Entry:
    """What a block has read, or was refused.

    Attributes:
        stage: where.
        order: its place among all that blocks have read in that stage.
        address: the module's.
        kind: of the port.
        value: as it was.
        edit: tells apart what it has put in its place; 0 if nothing.
        refused: the exception that it got instead, and may have caught.
    """

    stage: int
    order: int
    address: str
    kind: str
    value: Any
    edit: int = 0
    refused: Failure | None = None


class Elsewhere(NamedTuple):
    """Stands for a module of another stage.

    Attributes:
        class_name: its class.
    """

    class_name: str

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        raise UnsupportedError(
            f"`{name}` of a {self.class_name} cannot be had here: a module that another one is called with stays in "
            "its stage of the pipeline, and the block runs in the others, too. Call the module by its name in the "
            "model (`model.lm_head(hidden)`)."
        )


class Told(NamedTuple):
    """What is told of one block and one step.

    Attributes:
        entries: what it has read, in order.
        failure: what ended it.
        over: it has ended, in whatever way.
    """

    entries: list[Entry]
    failure: Failure | None = None
    over: bool = False


class Places:
    """Which modules are where.

    Args:
        stage: the number of this stage.
        trees: the modules that each stage has.
        tables: those of their modules that are tables, and how many rows these have.

    Attributes:
        stage: the number of this stage.
        last: it is the last one.
        tree: that of the whole model.
        tables: those of the whole model.
    """

    def __init__(
        self, stage: int, trees: Sequence[Mapping[str, ModuleInfo]], tables: Iterable[Mapping[str, int]] = ()
    ) -> None:
        self.stage = stage
        self.last = stage == len(trees) - 1
        self._owners: dict[str, list[int]] = {}
        modules: dict[str, ModuleInfo] = {}
        for number, tree in enumerate(trees):
            for address, info in tree.items():
                if info.class_name == ABSENT:
                    continue
                self._owners.setdefault(address, []).append(number)
                known = modules.get(address)
                modules[address] = info if known is None or len(info.children) > len(known.children) else known
        self.tree = ModuleTree(modules)
        self.tables = {address: rows for found in tables for address, rows in found.items()}

    def here(self, address: str) -> bool:
        """Whether this stage has the module."""
        return self.stage in self._owners.get(address, ())

    def earlier(self, port: Port) -> bool:
        """Whether only earlier stages have the port's module."""
        return not port.of_step and max(self._owners.get(port.address, [self.stage])) < self.stage


class Script:
    """What one block has read in its step, and what other stages say that it has.

    Args:
        places: which modules are where.
        clock: counts what all blocks of this stage read.

    Attributes:
        places: which modules are where.
        read: what it has read so far, here and before, in order.
        given: what it is still to be told.
        failure: what has ended it in an earlier stage.
        over: it has ended in an earlier stage.
    """

    def __init__(self, places: Places, clock: Iterator[int]) -> None:
        self.places = places
        self._clock = clock
        self._heard: dict[int, int] = {}
        self.read: list[Entry] = []
        self.given: deque[Entry] = deque()
        self.failure: Failure | None = None
        self.over = False

    def note(self, port: Port, value: object) -> Entry:
        """The block reads this now, and may change it."""
        entry = self._entry(port, map_tensors(value, torch.Tensor.clone))
        self.read.append(entry)
        return entry

    def refuse(self, port: Port, error: Exception) -> None:
        """The block gets this instead of the port that it asks for: if it catches that, it does so in all stages."""
        entry = self._entry(port, None)
        entry.refused = describe(error)
        self.read.append(entry)

    def _entry(self, port: Port, value: object) -> Entry:
        return Entry(self.places.stage, next(self._clock), port.address, port.kind, value)

    def give(self, entries: Iterable[Entry], *, back: bool) -> None:
        """The block is to be told of these.

        Args:
            entries: what it has read; of this, what was read here or told before is left out.
            back: by later stages, not by earlier ones.
        """
        own = self.places.stage
        self.given.clear()
        self.given.extend(
            entry
            for entry in entries
            if (entry.stage > own and entry.order > self._heard.get(entry.stage, -1) if back else entry.stage < own)
        )

    def next(self, port: Port) -> Entry | None:
        """What the block is told of the port that it asks for; None if it is to wait for it.

        Raises:
            RanksError: another stage says that it asked for another one, or has ended.
            PortPassedError: the port is one of an earlier stage, where it was not asked for.
            whatever the block was refused it with in another stage, or has ended it in an earlier one.
        """
        if self.given:
            entry = self.given.popleft()
            if port_at(entry.address, entry.kind) is not port:
                raise RanksError(
                    f"the block asked for {port}, and for {port_at(entry.address, entry.kind)} at the same place in "
                    f"stage {entry.stage} of the pipeline. {_ALIKE}"
                )
            if entry.stage < self.places.stage:
                self.read.append(replace(entry, value=map_tensors(entry.value, torch.Tensor.clone)))
            else:
                self._heard[entry.stage] = entry.order
            if entry.refused is not None:
                raise rebuild(entry.refused)
            return entry
        self._check_over_before(f"it asks for {port}")
        if self.places.earlier(port):
            passed = PortPassedError(
                f"{_what(port)}: it belongs to an earlier stage of the pipeline than what the block has read or "
                "called before, and that stage was done first. Within a step, read and write ports and call modules in "
                "execution order, and those of later stages (the last norm, the output head) after them."
            )
            self.refuse(port, passed)
            raise passed
        return None

    def leave(self, entry: Entry, changed: Sequence[torch.Tensor | None]) -> None:
        """The block leaves the port that it has read this at, and has put this in its place.

        Raises:
            RanksError: that is not what it has put there in the stage that has the port.
            whatever has ended the block there.
        """
        edit = checksum(changed)
        if entry.stage == self.places.stage:
            entry.edit = edit
        elif entry.edit != edit:
            if self.failure is not None and not self.given:  # it may have come to an end in the middle of this
                raise rebuild(self.failure)
            raise RanksError(
                f"what the block wrote at {port_at(entry.address, entry.kind)} in stage {entry.stage} of the pipeline "
                f"is not what it writes there in stage {self.places.stage}. If it has called a module of a later stage "
                f"between, change the value before that call. {_ALIKE}"
            )

    def check_over(self, *, ends: bool) -> None:
        """The block needs nothing more of this step.

        Args:
            ends: nor of the steps to come.

        Raises:
            RanksError: in another stage it does.
            whatever has ended the block in an earlier stage.
        """
        if self.given:
            port = port_at(self.given[0].address, self.given[0].kind)
            raise RanksError(
                f"the block asked for {port} in stage {self.given[0].stage} of the pipeline, and for no further port "
                f"of the step in stage {self.places.stage}. {_ALIKE}"
            )
        if self.failure is not None or not ends:
            self._check_over_before("it goes on")

    def _check_over_before(self, here: str) -> None:
        if self.failure is not None:
            raise rebuild(self.failure)
        if self.over:
            raise RanksError(
                f"the block has ended in an earlier stage of the pipeline, and in stage {self.places.stage} {here}. "
                f"{_ALIKE}"
            )

    def begin(self) -> None:
        """A step of the block begins."""
        self.read = []


_ALIKE = (
    "A block runs in each stage, with the same values and random numbers. What differs from process to process (the "
    "time, ids of objects and processes, files) must not decide what it asks for, calls or writes."
)


def _what(port: Port) -> str:
    """What came too late."""
    return f"{port.address} cannot be called any more in this step" if port.kind == CALL else f"{port} has passed"


def encode(message: object) -> bytes:
    """A message between stages, which are processes of one engine and trust each other as vLLM's do."""
    buffers: list[bytes] = []
    out = io.BytesIO()
    _Pickler(out, buffers).dump(message)
    return pickle.dumps((out.getvalue(), buffers))


def decode(data: bytes, device: torch.device | None) -> Any:
    """The message, with its tensors on a device."""
    head, buffers = pickle.loads(data)
    with torch.inference_mode(False):
        return _Unpickler(io.BytesIO(head), buffers, device).load()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, buffers: list[bytes]) -> None:
        super().__init__(out, protocol=5)
        self._buffers = buffers

    def persistent_id(self, obj: object) -> object:
        """Tensors go apart, as bytes; modules (some take others as arguments) stay where they are."""
        if isinstance(obj, torch.nn.Module):
            return type(obj).__name__
        if not isinstance(obj, torch.Tensor):
            return None
        plain = obj.detach().cpu().contiguous()
        self._buffers.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return len(self._buffers) - 1, plain.dtype, tuple(plain.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, buffers: list[bytes], device: torch.device | None) -> None:
        super().__init__(data)
        self._buffers = buffers
        self._device = device

    def persistent_load(self, pid: Any) -> object:
        """See `_Pickler`."""
        if isinstance(pid, str):
            return Elsewhere(pid)
        number, dtype, shape = pid
        data = self._buffers[number]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(shape).to(self._device or flat.device)


def combined(before: Learned | None, own: Learned | None) -> Learned | None:
    """Order and shapes of the ports of the stages before and of this one."""
    if before is None or own is None:
        return own
    return Learned(before.order + own.order, {**own.shapes, **before.shapes} | own.shapes)
