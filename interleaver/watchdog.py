"""The thread that looks after the turns of all blocks of a process.

There is one, a daemon, started with the first block that has limits. It looks every few hundredths of a second while
blocks have turns, and sleeps when for some time none has had one. Blocks store nothing for it but the number of their
turn: when that began, and how much memory there was then, is what the thread saw when it first met the number.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..envoy.errors import MemoryLimitError, TimeLimitError
from .async_error import Waker
from .memory import Memory, shown

if TYPE_CHECKING:
    from .guard import Guard

PERIOD = 0.05
_GRACE = 0.25
_QUIET = 20


class Seen:
    """What is known of a block's turn.

    Attributes:
        number: of the turn.
        since: when it was first seen.
        stopped: when the block was last stopped, or `since`.
        base: memory of the process at first.
        most: what may be added to that.
    """

    def __init__(self, number: int, now: float, base: int, most: float | None) -> None:
        self.number = number
        self.since = self.stopped = now
        self.base = base
        self.most = most


class Watchdog:
    """The watching thread and what it watches.

    Attributes:
        asleep: it has to be woken (`wake`) when a turn begins.
        waker: raises in the main thread, when that one waits.
    """

    def __init__(self) -> None:
        self.asleep = False
        self.waker = Waker(self._in_main_thread)
        self._guards: set[Guard] = set()
        self._thread: threading.Thread | None = None
        self._prepared = 0
        self._woken = threading.Event()

    def add(self, guard: Guard) -> None:
        """Watch a block from now on, whose turns this thread runs."""
        runs = threading.get_ident()
        if not self._guards or self._prepared != runs:  # not for each of many blocks that come at once
            self.waker.prepare()
            self._prepared = runs
        self._guards.add(guard)
        if self._thread is None or not self._thread.is_alive():  # a process that was forked off has none
            self._woken = threading.Event()
            self._thread = threading.Thread(target=self._run, name="invivo watchdog", daemon=True)
            self._thread.start()

    def remove(self, guard: Guard) -> None:
        """Watch a block no longer."""
        self._guards.discard(guard)

    def wake(self) -> None:
        """Have the thread look again."""
        self.asleep = False
        self._woken.set()

    def _run(self) -> None:
        quiet, memory = 0, _memory()
        while True:
            time.sleep(PERIOD)
            now = time.monotonic()
            running = [guard for guard in tuple(self._guards) if guard.number % 2 and _look(guard, now, memory)]
            quiet = 0 if running else quiet + 1
            if quiet > _QUIET:
                quiet = 0
                self._woken.clear()
                self.asleep = True
                # A turn that began before that was set has not woken anybody, but can be seen.
                if not any(guard.number % 2 for guard in tuple(self._guards)):
                    self._woken.wait()
                self.asleep = False

    def _in_main_thread(self) -> None:
        """Run by the signal: raise in the block that was stopped, if it is the one that runs."""
        for guard in tuple(self._guards):
            if guard.error is not None and guard.number % 2 and guard.inside():
                raise guard.kind


def _memory() -> Memory | None:
    """The process's memory, where it can be told (`limits` refuses a limit of it elsewhere)."""
    return Memory() if Memory.known() else None


def _look(guard: Guard, now: float, memory: Memory | None) -> bool:
    """Look at a block that has its turn."""
    number, seen, limits = guard.number, guard.seen, guard.limits
    if seen is None or seen.number != number:
        base, most = 0, limits.memory
        if most is not None and memory is not None:
            base, most = memory.resident(), most if most >= 1 else most * memory.available()
        guard.seen = Seen(number, now, base, most)
        return True
    error = guard.error
    if error is not None:
        if now - seen.stopped < _GRACE:
            return True
    elif limits.time is not None and now - seen.since >= limits.time:
        error = TimeLimitError(
            f"the block went on for {now - seen.since:.1f} seconds without asking for a port, and the limit is "
            f"{limits.time:g}; everything else in the engine waits meanwhile. Do the long computation after the "
            "`with`, or make the model with a higher `time_limit`."
        )
    elif seen.most is not None and memory is not None and (added := memory.resident() - seen.base) > seen.most:
        error = MemoryLimitError(
            f"the block added {shown(added)} to the memory of its process in one turn, and the limit is "
            f"{shown(seen.most)}. Keep less of what it computes, or make the model with a higher `memory_limit`."
        )
    if error is not None:
        seen.stopped = now
        guard.stop(number, error)
    return True


WATCHDOG = Watchdog()
"""The one of the process."""
