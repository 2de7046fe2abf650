"""``with model.trace(...)``: capture on entry, run on exit.

Entering captures the body and arranges for the caller to skip it; leaving sends it to the backend, waits, and brings
home what it saved, printed and warned of, or raises what it raised. A backend that streams is not waited for: all that
happens when the caller takes the last output, but for the binding of names, since the `with` has ended then.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ..envoy.envoy import RootEnvoy
from ..envoy.errors import InvivoWarning
from .block import Block, Payload
from .capture import Site, locate, read
from .failure import Failure, rebuild
from .frames import Skipper, bind
from .packing import make_payload
from .results import unpack
from .streaming import Ended, StreamingBackend
from .tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .backend import Backend, Reply


class Trace:
    """One trace, as a context manager; used once.

    Args:
        model: the model whose Envoys the block may use.
        backend: what runs it, and waits for it or not.
        request: what the backend makes of the prompt and sampling arguments.
        seed: seed of the random numbers drawn in the block.
    """

    def __init__(self, model: RootEnvoy, backend: Backend | StreamingBackend, request: object, seed: int) -> None:
        self._model = model
        self._backend = backend
        self._request = request
        self._seed = seed
        self._tracer = Tracer()
        self._site: Site | None = None
        self._payload: Payload | None = None
        self._skipper: Skipper | None = None

    def __enter__(self) -> Tracer:
        """Capture the body.

        Raises:
            CaptureError: the body cannot be captured.
            UnknownNameError: it names a module that the model does not have.
            TransferError: it uses a variable that cannot travel.
        """
        frame = sys._getframe(1)
        site = locate(frame)
        self._payload = make_payload(site, read(site, frame), self._model, self._seed)
        self._site = site
        self._skipper = Skipper(frame, site, self._tracer)
        self._skipper.arm()
        return self._tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Run the block, and bind what it saved.

        Raises:
            whatever the block raised, and the errors of the backend.
        """
        assert self._skipper is not None and self._site is not None and self._payload is not None
        frame = self._skipper.skipped(error)
        if frame is None:
            return False
        site, home = self._site, _Homecoming(self._tracer, self._model, self._site.block)
        try:
            if isinstance(self._backend, StreamingBackend):
                self._tracer.follow(self._backend.submit(self._payload, self._request, home))
                return True
            reply, result = self._backend.run(self._payload, self._request)
        except BaseException as raised:
            leave_out(error, raised)
            raise
        home.arrived(0, reply, result)
        end = home.ended(lambda saves: bind(frame, saves, site.global_names))
        if end.error is not None:
            raise_from_block(end.error, end.saves)
        return True


class _Homecoming:
    """What is done with what a block sends home; see `streaming.Delivery`.

    The tracer is known weakly: whatever waits for the outputs of its request must not keep it.
    """

    def __init__(self, tracer: Tracer, model: RootEnvoy, block: Block) -> None:
        self._tracer = weakref.ref(tracer)
        self._model = model
        self._block = block
        self._saves: dict[str, object] = {}
        self._failure: Failure | None = None
        self._warnings: tuple[tuple[str, int], ...] = ()

    def arrived(self, invoke: int, reply: Reply, result: object) -> dict[str, object]:
        take_in(self._model, reply)
        self._saves, self._failure, self._warnings = unpack(reply.saves), reply.failure, reply.warnings
        tracer = self._tracer()
        if tracer is not None:
            tracer.finish(self._saves, result)
        return self._saves

    def ended(self, name: Callable[[dict[str, object]], None] = lambda saves: None) -> Ended:
        """As in `Delivery`; `name` is given the saves of a block that has ended well."""
        if self._failure is None:
            name(self._saves)
        warned = warn_of(self._warnings, self._block)
        return Ended(self._saves, {}, rebuild(self._failure) if self._failure is not None else warned)


def take_in(model: RootEnvoy, reply: Reply) -> None:
    """Show what a block has printed, and learn what the model was seen to do."""
    if reply.printed:
        sys.stdout.write(reply.printed)
    if reply.learned is not None:
        model.learn(reply.learned)


def warn_of(messages: Iterable[tuple[str, int]], block: Block) -> Exception | None:
    """Show the warnings of a block, each a message and a line (0: none).

    Returns:
        The first that the caller's filters have made an error. It is raised when all that came home is in place.
    """
    first = None
    for message, line in messages:
        try:
            warnings.warn_explicit(message, InvivoWarning, block.filename, line or block.lineno)
        except Exception as error:
            error.__context__ = None  # what has skipped the body
            first = first or error.with_traceback(None)
    return first


def leave_out(skip: BaseException | None, raised: BaseException) -> None:
    """Take the exception that skipped the body out of what `raised` came from."""
    while skip is not None and raised.__context__ is not None:
        if raised.__context__ is skip:
            raised.__context__ = skip.__context__
            return
        raised = raised.__context__


def raise_from_block(error: BaseException, saves: dict[str, object]) -> NoReturn:
    """Raise a block's exception with its own context, not with the exception that skipped the body."""
    error.saves = saves  # type: ignore[attr-defined]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context
