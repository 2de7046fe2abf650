"""What travels from the caller to the model: a block, its values, and the request they belong to.

The wire carries source text and values, never bytecode, so the two ends may run different Python versions. The structs
are frozen and versioned; the only opaque part is `Payload.values`, a cloudpickle stream (see `codec`).
"""

from __future__ import annotations

from typing import Literal, NoReturn

import msgspec

from ..envoy.errors import ForeignError

FORMAT = 1
"""Version of the wire format; a payload of another version is refused."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """The source of one captured body.

    Attributes:
        source: the whole lines of the `with` statement, as in the file (indentation kept).
        filename: the file name of the caller's code object; tracebacks show it.
        lineno: line number of the first line of `source` in that file.
        item: index of the item of the `with` that is the trace; later items belong to the body.
        name: name of the code object around the `with` (``<module>``, a function's name, ...).
        scope: kind of the scope around the `with`; decides how names in the body resolve.
        tracer: the name after `as`, if any.
        parameters: names that the block reads from the caller's local scope.
        owner: name of the class around the `with`, which mangles ``__names`` in it; ``""`` if there is none.
        lazy_annotations: whether ``from __future__ import annotations`` is in force there.
    """

    source: str
    filename: str
    lineno: int
    item: int
    name: str
    scope: Literal["module", "function", "class"]
    tracer: str | None
    parameters: tuple[str, ...]
    owner: str = ""
    lazy_annotations: bool = False


class TensorBlob(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: torch dtype name without the ``torch.`` prefix, shape, and contiguous little-endian bytes.

    With `common` at 0 or more the bytes are not here: it is that one of the tensors that the blocks of a trace have in
    common (`Group.common`).
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    common: int = -1


class SharedValues(msgspec.Struct, frozen=True, array_like=True):
    """Containers that several blocks of a trace use as one object; they are met in the order of `Group.shared`.

    Attributes:
        empty: cloudpickle bytes of each container without its items, by key.
        contents: the same of each container with its items; those that are shared themselves are referred to by key.
        tensors: buffers that `contents` refers to by index.
    """

    empty: bytes
    contents: bytes
    tensors: tuple[TensorBlob, ...]


class Home(msgspec.Struct, frozen=True, array_like=True):
    """What was saved around the invokes and holds shared containers: it comes home when all blocks have ended.

    Attributes:
        values: cloudpickle bytes of the values by name.
        tensors: buffers that `values` refers to by index.
    """

    values: bytes
    tensors: tuple[TensorBlob, ...]


class Group(msgspec.Struct, frozen=True, array_like=True):
    """The place of a block among the invokes of one trace.

    Attributes:
        trace: id of the trace, the same in all of its invokes.
        index: which of the invokes this is, in the order in which they were written.
        size: how many there are.
        takes: names whose values come from an earlier invoke, with the index of that one: what the name holds at the
            end of its block.
        gives: names whose values later invokes take from this one.
        barriers: the barriers that the block refers to, each with the number of blocks that meet there.
        shared: containers that are one object in all blocks of the trace; the same in each of its payloads.
        home: values to send home with the block that ends last; None if there are none.
        common: tensors that several blocks captured. A backend that sends requests one by one sends these ahead, once.
        sampled: it is one of several samples (``n``) of its invoke, each of which takes values of its own.
    """

    trace: str
    index: int
    size: int
    takes: tuple[tuple[str, int], ...]
    gives: tuple[str, ...]
    barriers: tuple[tuple[str, int], ...]
    shared: tuple[SharedValues, ...] = ()
    home: Home | None = None
    common: tuple[TensorBlob, ...] = ()
    sampled: bool = False

    @property
    def alone(self) -> bool:
        """Whether the block shares nothing with others that they could tell the order of their turns from."""
        return not (self.shared or self.takes or self.barriers)

    @property
    def own(self) -> bool:
        """Whether no other block may change what this one saves."""
        return not (self.shared or self.takes or self.gives)


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """One block for one request.

    Attributes:
        version: `FORMAT` of the sender.
        trace: unique id of the trace; results are fetched under it.
        block: the source.
        values: cloudpickle bytes of ``{"local": {...}, "global": {...}}``.
        tensors: buffers that `values` refers to by index.
        seed: seed of the random numbers drawn in the block.
        uses: what the block may touch of the process: the random numbers of ``"random"``, ``"numpy"`` and ``"torch"``,
            torch's ``"modes"``; and whether it ``"prints"``.
        group: the other invokes of the trace; None if it is one request by itself.
        streams: the caller takes values saved with ``stream=True`` as they come.
        no_module: the block meets no module, only logits and samples (`meets`).
        steady: the block does the same in each step and only reads (`steady`), and the caller runs the trace again if
            that turns out not to be so.
    """

    version: int
    trace: str
    block: Block
    values: bytes
    tensors: tuple[TensorBlob, ...]
    seed: int
    uses: tuple[str, ...]
    group: Group | None = None
    streams: bool = False
    no_module: bool = False
    steady: bool = False


class TracerHandle:
    """Base of the objects that a `with` binds after `as`; the codec sends them as a reference, not by value."""

    described = "the tracer of a trace that has ended"

    @property
    def spent(self) -> bool:
        """Whether its block is over, so that a new one cannot mean this tracer."""
        return False


class SpentTracer(TracerHandle):
    """Stands for a tracer whose block is over, in a block that has captured it with something else.

    Args:
        described: what it was.
    """

    def __init__(self, described: str = TracerHandle.described) -> None:
        self.described = described

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ForeignError(
            f"`.{name}` was asked of {self.described}. Take what you need of it (`.saves`, "
            "`.result`) into a variable before the `with`, and use that in the block."
        )
