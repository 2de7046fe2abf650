"""Ctrl-C while an engine starts.

vLLM waits for the processes that it has spawned in a way that loses a `KeyboardInterrupt`, or hangs with it. Here an
interrupt ends those processes, which makes vLLM give up, and is raised then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil


@contextmanager
def interruptible_start() -> Iterator[None]:
    """Around the start of an engine: an interrupt kills what was started and is raised when that has failed.

    Only the main thread gets signals; elsewhere, and where somebody else handles interrupts, nothing is changed.

    Raises:
        KeyboardInterrupt: there was an interrupt.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        _kill(before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        _kill(before)
        raise KeyboardInterrupt


def _kill(spared: set[int]) -> None:
    """Kill all processes below this one but the spared ones and Python's own resource tracker."""
    for child in psutil.Process().children(recursive=True):
        try:
            if child.pid not in spared and "resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
        except psutil.NoSuchProcess:
            continue
