"""Installs the pinned packages into a virtual environment, and shows how far it is.

The Makefile runs it with the Python of the new environment, before anything is installed there: it needs only the
standard library and pip.

    .venv/bin/python scripts/environment.py cpu      # or cuda
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Self

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "--progress-bar", "off"]
NAMED = re.compile(r"\s*(?:Collecting|Processing|Requirement already satisfied:) (?:\S*/)?([A-Za-z0-9][\w.\-]*)")


def main(device: str) -> int:
    """Installs ``requirements/{device}.txt`` and ``requirements/dev.txt``; returns pip's exit code."""
    pinned = ["--no-deps"] if device == "cpu" else []
    code = install([*pinned, "-r", str(REQUIREMENTS / f"{device}.txt")], f"requirements/{device}.txt")
    code = code or install(["--no-deps", "-r", str(REQUIREMENTS / "dev.txt")], "requirements/dev.txt")
    if code == 0 and subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode:
        # This torch was built for CUDA and cannot be imported without the libraries that it asks for.
        code = install([torch_pin()], "the CUDA libraries that this build of torch asks for")
    return code


def torch_pin() -> str:
    """The line of cpu.txt that pins torch."""
    lines = (REQUIREMENTS / "cpu.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(arguments: list[str], title: str) -> int:
    """Runs pip; its output is shown only when it fails."""
    output: list[str] = []
    command = subprocess.Popen([*PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with Progress(title) as progress, command as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            if named := NAMED.match(line):
                progress.fetched(named.group(1))
            elif line.startswith("Installing collected packages:"):
                progress.unpacking(line.count(",") + 1)
        code = pip.wait()
        progress.end = "failed" if code else "done"
    if code:
        sys.stdout.writelines(output)
    return code


class Progress:
    """One line on a terminal, written again and again; elsewhere a line every ten seconds."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.count = 0
        self.state, self.end = "asking pip", "stopped"
        self.began = time.monotonic()
        self.total = 0
        self.installed = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def fetched(self, name: str) -> None:
        """pip has found a package."""
        self.count += 1
        self.state = f"{self.count} packages, {re.split(r'-[0-9]', name)[0]}"

    def unpacking(self, total: int) -> None:
        """pip has everything and now unpacks it, without a word; the folder tells how far it is."""
        self.installed, self.total = packages(), total

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()
        self._show(self.end, last=True)

    def _run(self) -> None:
        pause = 0.2 if sys.stdout.isatty() else 10.0
        while not self.done.wait(pause):
            if self.total:
                self.state = f"unpacking, {min(packages() - self.installed, self.total)} of {self.total}"
            self._show(self.state)

    def _show(self, state: str, last: bool = False) -> None:
        line = f"    {self.title}: {state} ({time.monotonic() - self.began:.0f} s)"
        if sys.stdout.isatty():
            print(f"\r\x1b[K{line}", end="\n" if last else "", flush=True)
        else:
            print(line, flush=True)


def packages() -> int:
    """How many packages the environment holds."""
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
