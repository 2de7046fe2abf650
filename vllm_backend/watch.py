"""Noticing that an engine's process has died.

vLLM notices it, too, and lets later calls fail. But whoever waits for the engine at that moment waits for ever: its
clients (`vllm/v1/engine/core_client.py`) close the socket and leave the waiting ones alone. And when a worker dies
during a call, the call fails first, with an exception like any other, and the engine's word of its own end comes later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from .compat import EngineDeadError

_PAUSE = 0.1
_LAST_WORDS = 5.0
"""Seconds in which an engine whose worker has died must have said that it dies, too."""

Run = Callable[[Callable[[], None]], object]


def watch(core: Any, run: Run = lambda action: action()) -> None:
    """Have all who wait for an engine get `EngineDeadError` once a process of it has ended.

    Args:
        core: the engine's client; one without processes of its own is left alone.
        run: runs something where the client's queue and futures may be touched; by default any thread will do.
    """
    manager = getattr(getattr(core, "resources", None), "engine_manager", None)
    if manager is None or not hasattr(manager, "sentinels"):
        return
    # The thread must not hold the client, which would never be let go of then.
    arguments = (manager.sentinels(), core.resources, core.outputs_queue, core.utility_results, run)
    threading.Thread(target=_watch, args=arguments, daemon=True, name="invivo-watch").start()


def _watch(sentinels: list[int], resources: Any, outputs: Any, calls: dict[int, Any], run: Run) -> None:
    def tell() -> None:
        outputs.put_nowait(EngineDeadError())
        for call in list(calls.values()):
            if not call.done():
                call.set_exception(EngineDeadError())

    connection.wait(sentinels)
    marked = False
    while not marked:  # once vLLM has marked the engine as dead, nobody begins to wait any more
        marked = resources.engine_dead
        try:
            run(tell)
        except RuntimeError:
            return  # the event loop where it would be told is closed
        time.sleep(_PAUSE)


def dies(core: Any) -> bool:
    """Whether the engine of a call that has failed is dead, or is about to be; may wait for seconds.

    Args:
        core: the engine's client; one without processes of its own lives.
    """
    resources = getattr(core, "resources", None)
    if resources is None:
        return False
    latest = time.monotonic() + _LAST_WORDS
    while not resources.engine_dead and time.monotonic() < latest:
        time.sleep(_PAUSE)
    return bool(resources.engine_dead)
