"""``with model.trace(**sampling)`` without a prompt: its body runs here, and the invokes in it run together at the end.

Entering captures the body and skips it like any other. Leaving runs it, rewritten as a block is (`program`), in the
caller's process: `tracer.invoke` captures, `x.save()` remembers. Then all invokes are sent, and what comes home is
bound (`homecoming`). A backend that streams is not waited for: what its invokes save comes when the caller takes their
outputs, and no names are bound but those of the invokes.
"""

from __future__ import annotations

import sys
import uuid
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..envoy.active import around_invokes
from ..envoy.envoy import RootEnvoy
from ..envoy.errors import MisuseError
from .block import Group, Payload
from .capture import Captured, Site, locate, read
from .check import check_names
from .common import Blobs, apart
from .dependencies import check_barriers
from .frames import Skipper, bind, release
from .handed import HandedOn
from .homecoming import Homecoming
from .invoke import Invoke
from .naming import Saved, held, saved_by_name, unheld
from .outer_tracer import MakeRequest, OuterTracer
from .packing import encode_values, new_id, payload_of
from .program import SAVE, Program, compile_block
from .repeated import Key, key_of
from .saves import save_method
from .sharing import Sharing
from .streaming import StreamingBackend
from .trace import leave_out, raise_from_block

if TYPE_CHECKING:
    from .backend import Backend

_MODULE = ("__name__", "__file__", "__package__", "__spec__", "__loader__")


class OuterTrace:
    """A trace of several prompts, as a context manager; used once.

    Args:
        model: the model whose Envoys the blocks may use.
        backend: what runs them, and waits for them or not.
        make_request: makes the backend's request, and the block's seed, of the prompt and sampling arguments of an
            invoke.
        sampling: sampling arguments of all invokes; those of an invoke go first.
    """

    def __init__(
        self,
        model: RootEnvoy,
        backend: Backend | StreamingBackend,
        make_request: MakeRequest,
        sampling: dict[str, Any],
    ) -> None:
        self._model = model
        self._backend = backend
        self._tracer = OuterTracer(uuid.uuid4().hex, make_request, sampling, self._take_in)
        self._site: Site | None = None
        self._captured = Captured({}, {})
        self._skipper: Skipper | None = None
        self._program: Program | None = None
        self._sharing = Sharing(model, ())
        self._blobs = Blobs()
        self._known: dict[Key, Payload] = {}
        self._saved: list[Saved] = []

    def __enter__(self) -> OuterTracer:
        """Capture the body.

        Raises:
            CaptureError: the body cannot be captured.
            UnknownNameError: it names a module that the model does not have.
        """
        frame = sys._getframe(1)
        site = locate(frame, "outer")
        self._captured = read(site, frame)
        check_names(site, self._captured)
        self._sharing = Sharing(self._model, self._captured.by_name().values())
        self._program = compile_block(site.block)
        self._site = site
        self._skipper = Skipper(frame, site, self._tracer)
        self._skipper.arm()
        return self._tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Run the body, then all invokes, and bind what was saved; or only start them, as the backend does.

        Raises:
            whatever the body raised, or else the first invoke that raised, and the errors of the backend.
        """
        assert self._skipper is not None and self._site is not None
        frame = self._skipper.skipped(error)
        if frame is None:
            return False
        try:
            scope = self._run_body(frame, self._site)
            invokes = self._tracer.invokes
            named = saved_by_name(scope, self._saved)
            payloads = self._payloads(scope, named)
            bind(
                frame,
                {name: value for name, value in scope.items() if isinstance(value, Invoke) and value in invokes},
                self._site.global_names,
            )
            requests = [invoke.sent() for invoke in invokes]
            home = self._homecoming(named)
            if isinstance(self._backend, StreamingBackend):
                self._tracer.follow(self._backend.submit_group(payloads, requests, home))
                return True
            outcomes = self._backend.run_group(payloads, requests)
        except BaseException as raised:
            leave_out(error, raised)
            raise
        for index, (reply, result) in enumerate(outcomes):
            home.arrived(index, reply, result)
        global_names = self._site.global_names
        end = home.ended(lambda saves: bind(frame, saves, global_names))
        if end.error is not None:
            raise_from_block(end.error, end.saves)
        return True

    def save(self, value: object, *, stream: bool, names: tuple[str, ...]) -> object:
        """A value is saved in the body; see `active.Outer`."""
        self._sharing.save(value)
        self._saved.append(Saved(value, names, self._line()))
        return value

    # --- the body

    def _run_body(self, frame: FrameType, site: Site) -> dict[str, object]:
        assert self._program is not None
        local, outer = dict(self._captured.locals), dict(self._captured.globals)
        self._captured = Captured({}, {})
        if site.block.tracer is not None:
            (outer if site.block.scope == "module" else local)[site.block.tracer] = self._tracer
        module = {name: frame.f_globals[name] for name in _MODULE if name in frame.f_globals}
        with around_invokes(self), self._tracer.open():
            scope = self._program.run(local, outer, {SAVE: save_method, **module})
        if not self._tracer.invokes:
            raise MisuseError(
                f"{site.block.filename}:{site.block.lineno}: the trace has no prompt, and its body made no invoke, so "
                "there is nothing to run. Give the prompt to the trace, or to `with tracer.invoke(prompt):` in it."
            )
        return scope

    def _line(self) -> int:
        """The line of the body that runs now."""
        assert self._program is not None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._program.runs(frame):
            frame = frame.f_back
        return frame.f_lineno if frame is not None else 0

    def _take_in(self, invoke: Invoke) -> None:
        """An invoke was captured: see what it takes from earlier ones and what it shares, and encode the rest."""
        assert invoke.site is not None and self._program is not None
        values = Captured(dict(invoke.values.locals), dict(invoke.values.globals))
        for names in values:
            for name, value in list(names.items()):
                if isinstance(value, HandedOn) and value.trace == invoke.trace and value.name == name:
                    invoke.takes[name] = value.index
                    del names[name]
        frame = invoke.frame
        while frame is not None and not self._program.runs(frame):
            frame = frame.f_back
        if frame is not None:
            invoke.local = frame is invoke.frame
            scope = frame.f_locals
            self._sharing.consider(scope.values())
            release(frame, scope)
        self._sharing.consider(values.locals.values())
        key = key_of(invoke.site, values, self._model, self._tracer)
        if key is not None and key in self._known:
            invoke.payload = structs.replace(self._known[key], trace=new_id(), seed=invoke.seed)
            return
        encoded = encode_values(invoke.site, values, self._model, self._sharing.key, self._blobs)
        invoke.barriers = tuple({**dict(encoded.barriers), **dict(self._sharing.settle())}.items())
        invoke.payload = payload_of(invoke.site, values, encoded, invoke.seed)
        if key is not None:
            self._known[key] = invoke.payload

    def _payloads(self, scope: dict[str, object], named: dict[str, object]) -> list[Payload]:
        """The payloads, now that it is known what each gives to others."""
        self._sharing.check_unchanged(scope)
        home = self._sharing.home(named)
        invokes = self._tracer.invokes
        takers = [invoke for invoke in invokes if invoke.takes]
        groups = [
            Group(
                trace=invoke.trace,
                index=invoke.index,
                size=len(invokes),
                takes=tuple(invoke.takes.items()),
                gives=tuple(sorted({name for other in takers for name in other.taken_from(invoke)})),
                barriers=invoke.barriers,
                shared=tuple(self._sharing.batches),
                home=home,
            )
            for invoke in invokes
        ]
        check_barriers(groups)
        payloads, common = apart([invoke.payload for invoke in invokes if invoke.payload is not None])
        uses = tuple(sorted(self._sharing.uses.union(*(payload.uses for payload in payloads))))  # functions pass around
        return [
            structs.replace(payload, group=structs.replace(group, common=common), uses=uses)
            for payload, group in zip(payloads, groups, strict=True)
        ]

    def _homecoming(self, named: dict[str, object]) -> Homecoming:
        assert self._site is not None
        here = {name: value for name, value in named.items() if not self._sharing.shares(value)}
        kept = held(named.values())
        lost = [
            (unheld(entry), entry.line or self._site.block.lineno)
            for entry in self._saved
            if id(entry.value) not in kept
        ]
        return Homecoming(self._tracer, self._model, self._site.block, here, lost)
