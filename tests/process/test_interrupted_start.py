"""Ctrl-C while an engine starts ends the start, at once and without a process left."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from smollm2 import smollm2_path
from support.checkpoints import tiny_checkpoint
from support.contract import ENGINE
from support.processes import start_script, still_there

pytestmark = pytest.mark.engine

SCRIPT = """\
from invivo import VLLM

model = VLLM({path!r}, mode={mode!r}, **{engine!r})
try:
    with model.trace([17, 31, 5], max_tokens=1):
        logits = model.logits.save()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_an_interrupt_while_the_engine_starts(tmp_path: Path, mode: str) -> None:
    path = str(tiny_checkpoint("llama", tokenizer=smollm2_path()))
    script = start_script(
        tmp_path / "start.py", SCRIPT.format(path=path, mode=mode, engine=ENGINE | {"max_model_len": 128})
    )
    assert script.stderr is not None
    assert any("invivo: starting a vLLM engine" in line for line in script.stderr)
    process = psutil.Process(script.pid)
    children: list[psutil.Process] = []
    while len(children) < 2:  # the resource tracker and the engine
        assert script.poll() is None
        children = process.children(recursive=True)
    script.send_signal(signal.SIGINT)
    stdout, stderr = script.communicate(timeout=100)
    assert script.returncode == 0, stderr[-4000:]
    assert "interrupted" in stdout
    assert not still_there(children)
