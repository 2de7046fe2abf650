"""An engine's process ends with the process that started it, even if that one was killed, and nothing stays of it.

vLLM's workers notice that their engine is gone, but its engine waits for requests for ever when nobody is left to send
any. Here it waits for the end of its parent too. And where its workers are in Ray, it has to end as vLLM means to: Ray
puts a handler in the place of vLLM's, which ends the process at once and leaves processes of Ray's for minutes.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from multiprocessing import current_process, parent_process

from .shared_files import remove, shared_files

_SECONDS = 30.0


def follow_parent() -> None:
    """Have this process end with its parent, and in vLLM's way, if it is one that vLLM started to run an engine in."""
    if parent_process() is not None and current_process().name.startswith("EngineCore"):
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # vLLM's handler, which Ray leaves there
        threading.Thread(target=_end_with_parent, name="invivo-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "asked before"
    parent.join()
    atexit.register(remove, shared_files(()))  # nobody else is left to do it
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's handler shuts the workers down
    threading.Event().wait(_SECONDS)
    os._exit(1)
