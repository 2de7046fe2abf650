"""Thousands of errors of torch, raised in greenlets that start at every depth of the stack, crash nothing.

An error in torch's C++ code unwinds the C stack, and a greenlet moves pieces of that stack: this is where a wrong
build of either would take the whole process down, so it is tried in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """\
import faulthandler
faulthandler.enable()

import torch
from invivo import Local, MisuseError

torch.set_num_threads(1)
torch.manual_seed(0)
module = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
model = Local(module)
x = torch.randn(2, 4)
raised = {}


def fail(kind):
    if kind == 0:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    elif kind == 1:
        torch.zeros(3)[9]
    elif kind == 2:
        torch.empty(10**15)
    elif kind == 3:
        torch.zeros(3).reshape(7)
    else:
        torch.ones(2, requires_grad=True).sum().backward(torch.ones(5))


def deeper(depth, kind):
    return deeper(depth - 1, kind) if depth else fail(kind)


def trace(outside, inside, kind):
    if outside:
        return trace(outside - 1, inside, kind)
    try:
        with model.trace(x):
            out = model[1].output
            try:
                fail(kind)
            except Exception:
                pass
            model[2].input
            deeper(inside, kind)
    except Exception as error:
        name = type(error).__name__
        raised[name] = raised.get(name, 0) + 1
    else:
        raise AssertionError("nothing was raised")


for number in range({count}):
    trace(number * 7 % 90, number * 13 % 110, number % 5)
    if number % 100 == 0:
        with model.trace(x):
            out = model[2].output.save()
        assert torch.equal(out, module(x)), number
model.check_integrity()
print(sum(raised.values()), sorted(raised))
"""


def test_torch_errors_in_greenlets_at_every_stack_depth(tmp_path: Path) -> None:
    script = tmp_path / "errors.py"
    script.write_text(SCRIPT.replace("{count}", "3000"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("3000 ['IndexError', 'RuntimeError'")
