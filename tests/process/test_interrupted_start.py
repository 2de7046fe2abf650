"""Ctrl-C while an engine starts ends the start, at once and without a process left."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from support.processes import descendants, finish, start_script, still_there

pytestmark = pytest.mark.engine

SCRIPT = """\
import signal

from invivo import VLLM

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
model = VLLM({path!r}, mode={mode!r}, **{engine!r})
try:
    with model.trace([17, 31, 5], max_tokens=1):
        logits = model.logits.save()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_an_interrupt_while_the_engine_starts(tmp_path: Path, mode: str) -> None:
    script = start_script(tmp_path, SCRIPT, mode=mode)
    assert script.stderr is not None
    assert any("invivo: starting a vLLM engine" in line for line in script.stderr)
    children: list[psutil.Process] = []
    while len(children) < 2:  # the resource tracker and the engine
        assert script.poll() is None
        children = descendants(script.pid)
    script.send_signal(signal.SIGINT)
    assert "interrupted" in finish(script).stdout
    assert not still_there(children)
