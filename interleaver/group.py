"""What the blocks of one trace have in common where they run: shared objects, values handed on, barriers.

The executor keeps one `GroupStore` for each trace of several invokes, from the launch of its first block until all of
them have ended (`Groups`). A block has its `Member` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Protocol

from ..envoy.errors import InvokeError
from ..tracer.block import Group, Payload, TensorBlob
from ..tracer.common import together

if TYPE_CHECKING:
    from .mediator import Mediator


class Read(Protocol):
    """Decodes captured values; see `tracer.codec.decode`."""

    def __call__(self, data: bytes, tensors: Sequence[TensorBlob], *, shared: Any = None) -> dict[str, Any]: ...


class Groups:
    """The traces of several blocks that run on one executor, by their ids."""

    def __init__(self) -> None:
        self._stores: dict[str, GroupStore] = {}
        self._common: dict[str, Sequence[TensorBlob]] = {}

    def __len__(self) -> int:
        return len(self._stores.keys() | self._common.keys())

    def bring(self, trace: str, common: Sequence[TensorBlob]) -> None:
        """The tensors that blocks of a trace have in common, where they do not come with each block."""
        self._common[trace] = common

    def common(self, group: Group) -> Sequence[TensorBlob]:
        """Those tensors of the trace of a block."""
        return group.common or self._common.get(group.trace, ())

    def join(self, group: Group) -> Member:
        """The place of a block that is launched now."""
        store = self._stores.get(group.trace)
        if store is None:
            store = self._stores[group.trace] = GroupStore(group.size)
        return Member(self, store, group)

    def drop(self, trace: str) -> None:
        """Forget a trace, of which maybe not all blocks were launched."""
        self._stores.pop(trace, None)
        self._common.pop(trace, None)


class GroupStore:
    """What the blocks of one trace have in common.

    Args:
        size: how many blocks the trace has.

    Attributes:
        objects: the shared objects by key.
        given: what blocks that have ended left under the names that others take.
        missing: for each block that has ended, why a name that it was to give is not there.
        left: blocks that have ended and sent their reply.
        over: blocks that have run to their end.
        waiting: for each barrier, the blocks that wait there.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.objects: dict[str, Any] = {}
        self.loaded = 0
        self.given: dict[tuple[int, str], object] = {}
        self.missing: dict[int, str] = {}
        self.left: set[int] = set()
        self.over: set[int] = set()
        self.members: dict[int, Member] = {}
        self.waiting: dict[str, list[Mediator]] = {}


class Member:
    """One block in the store of its trace.

    Attributes:
        index: its number.
        mediator: the block itself, once there is one.
    """

    def __init__(self, groups: Groups, store: GroupStore, group: Group) -> None:
        self.index = group.index
        self.mediator: Mediator | None = None
        self._groups = groups
        self._store = store
        self._group = group
        self._read: Read | None = None
        store.members[group.index] = self

    def tensors(self, payload: Payload) -> Sequence[TensorBlob]:
        """The tensors that the block has captured."""
        return together(payload.tensors, self._groups.common(self._group))

    @property
    def alone(self) -> bool:
        """See `Group.alone`."""
        return self._group.alone

    @property
    def own(self) -> bool:
        """Whether no other block may change what this one saves."""
        return self._group.own

    # --- shared objects

    def load(self, read: Read) -> None:
        """Make the shared objects, unless another block has."""
        self._read = read
        store = self._store
        for values in self._group.shared[store.loaded :]:
            objects = read(values.empty, ())["shared"]
            store.objects.update(objects)
            contents = read(values.contents, values.tensors, shared=self.shared)["shared"]
            for key, items in contents.items():
                _fill(objects[key], items)
            store.loaded += 1

    def shared(self, key: str) -> object:
        """The shared object of a key."""
        return self._store.objects[key]

    @property
    def shared_ids(self) -> Collection[int]:
        """Identities of the shared objects."""
        return frozenset(map(id, self._store.objects.values()))

    # --- values handed on

    def take(self, warn: Callable[[str], None]) -> dict[str, object]:
        """The values that this block takes from earlier ones; one of several samples takes copies.

        Args:
            warn: told of values that cannot be copied, so that the samples have one object in common.

        Raises:
            InvokeError: one is not there.
        """
        taken = {}
        memo = {id(value): value for value in self._store.objects.values()}  # these are one object for all
        for name, index in self._group.takes:
            if (index, name) not in self._store.given:
                why = self._store.missing.get(index, "it has not ended yet")
                raise InvokeError(
                    f"invoke {self.index} reads `{name}`, which invoke {index} was to hand on, and {why}. What a name "
                    "holds at the end of an earlier invoke is taken over if it may be read before it is assigned; "
                    f"assign `{name}` in this invoke first if it is not meant to."
                )
            value = self._store.given[index, name]
            if self._group.sampled:
                try:
                    value = deepcopy(value, memo)
                except Exception as error:  # of any class, whose own code copies it
                    warn(
                        f"`{name}`, which invoke {index} hands on, cannot be copied ({type(error).__name__}: {error}). "
                        "All samples of this invoke have the same object, and see what another one does to it."
                    )
            taken[name] = value
        return taken

    def give(self, scope: Mapping[str, object], failure: BaseException | None) -> None:
        """The block has run to its end: keep what others take from it."""
        if self.index in self._store.over:
            return
        self._store.over.add(self.index)
        for barrier in list(self._store.waiting):
            self._forget(barrier)
        if failure is not None:
            self._store.missing[self.index] = f"that one failed ({type(failure).__name__}: {failure})"
            return
        self._store.missing[self.index] = "that one ended without assigning it"
        for name in self._group.gives:
            if name in scope:
                self._store.given[self.index, name] = scope[name]

    # --- barriers

    def arrive(self, mediator: Mediator, barrier: str, count: int) -> list[Mediator] | None:
        """The block has come to a barrier.

        Returns:
            The blocks that go on, in invoke order, if it was the last; None if it has to wait.
        """
        waiting = self._store.waiting.setdefault(barrier, [])
        waiting.append(mediator)
        if len(waiting) < count:
            return None
        del self._store.waiting[barrier]
        return sorted(waiting, key=lambda other: other.index)

    def stranded(self) -> list[tuple[Mediator, InvokeError]]:
        """Blocks at barriers that cannot fill any more, with the error for each."""
        found: list[tuple[Mediator, InvokeError]] = []
        if not self._store.waiting:
            return found
        coming_to_none = sum(not self._comes_anywhere(index) for index in range(self._store.size))
        stuck = sum(map(len, self._store.waiting.values())) == self._store.size - coming_to_none
        for barrier, waiting in list(self._store.waiting.items()):
            at = {mediator.index for mediator in waiting}
            coming = [index for index in range(self._store.size) if index not in at and self._may_come(index, barrier)]
            count = waiting[0].member.count_of(barrier) if waiting[0].member is not None else 0
            if stuck or len(at) + len(coming) < count:
                why = "all others wait too" if stuck and coming else "too few of the others can come any more"
                found += [(mediator, mediator.member._unmet(barrier, why)) for mediator in waiting if mediator.member]
                del self._store.waiting[barrier]
        return found

    def count_of(self, barrier: str) -> int:
        """How many blocks meet at a barrier that this block refers to."""
        return dict(self._group.barriers)[barrier]

    def unmet(self, barrier: str, why: str) -> InvokeError:
        """The error for this block, which waits at a barrier in vain; it waits there no longer."""
        error = self._unmet(barrier, why)
        self._forget(barrier)
        return error

    def _forget(self, barrier: str) -> None:
        """This block waits there no longer."""
        waiting = [mediator for mediator in self._store.waiting.pop(barrier, []) if mediator.index != self.index]
        if waiting:
            self._store.waiting[barrier] = waiting

    def _unmet(self, barrier: str, why: str) -> InvokeError:
        at = sorted({self.index, *(mediator.index for mediator in self._store.waiting.get(barrier, []))})
        over = [index for index in range(self._store.size) if not self._comes_anywhere(index)]
        return InvokeError(
            f"invoke {self.index} waited at a barrier of {self.count_of(barrier)} blocks, and {why}. "
            f"At the barrier: {_listed(at)}; ended before: {_listed(over)}; the trace has {self._store.size} invokes. "
            "Have as many blocks call the barrier as `tracer.barrier(n)` says, and their requests live long enough "
            "(`max_tokens`)."
        )

    def _may_come(self, index: int, barrier: str) -> bool:
        member = self._store.members.get(index)
        return self._comes_anywhere(index) and (member is None or barrier in dict(member._group.barriers))

    def _comes_anywhere(self, index: int) -> bool:
        """Whether a block may come to a barrier: it has not ended, and does not wait for the end of its request."""
        member = self._store.members.get(index)
        mediator = member.mediator if member is not None else None
        return index not in self._store.over and (mediator is None or not mediator.waits_for_end)

    # --- the end

    def leave(self) -> dict[str, object] | None:
        """The block's reply is made.

        Returns:
            What was saved around the invokes, if this was the last block of the trace and there is something.
        """
        store = self._store
        store.left.add(self.index)
        if len(store.left) < store.size:
            return None
        self._groups.drop(self._group.trace)
        home = self._group.home
        if home is None:
            return None
        read = self._read or next((member._read for member in store.members.values() if member._read), None)
        if read is None:
            return None
        values: dict[str, object] = read(home.values, home.tensors, shared=self.shared)["home"]
        return values


def shares(mediator: Mediator) -> bool:
    """Whether other blocks can tell the order of the turns of this one."""
    return mediator.member is not None and not mediator.member.alone


def _fill(empty: Any, items: Any) -> None:
    """Put the items of one container into another one of its kind."""
    if isinstance(empty, dict):
        for key, value in items.items():
            empty[key] = value
    elif isinstance(empty, set):
        empty.update(items)
    else:
        empty.extend(items)


def _listed(indices: Sequence[int]) -> str:
    return (
        "invokes " + ", ".join(map(str, indices)) if len(indices) > 1 else f"invoke {indices[0]}" if indices else "none"
    )
