"""The benchmarks: one program, one table.

    python benchmarks/run.py               all of it (`make bench`); writes benchmarks/results/
    python benchmarks/run.py --no-engine   what can be measured without an engine; writes nothing

The exit code says whether every figure is within its bar.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
sys.path.append(str(HERE.parent / "scripts"))

from measure import Figure, machine  # noqa: E402
from quiet import quiet  # noqa: E402


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--no-engine", action="store_true", help="leave out what needs an engine")
    options = parser.parse_args()
    quiet()
    console = Console()
    console.width = max(console.width, 90)
    described = machine()
    figures: list[Figure] = []
    for title, measure in _parts(engine=not options.no_engine):
        console.print(f"[dim]measuring: {title}[/]")
        figures += measure()
    console.print(_table(figures))
    console.print(f"[dim]{', '.join(f'{name} {value}' for name, value in described.items())}[/]")
    if not options.no_engine:
        _write(described, figures)
    return int(any(figure.met is False for figure in figures))


def _parts(engine: bool) -> list[tuple[str, Callable[[], list[Figure]]]]:
    from in_process import capture, import_time, ports

    parts: list[tuple[str, Callable[[], list[Figure]]]] = [
        ("import", lambda: import_time(15)),
        ("capture", lambda: capture(300)),
        ("ports", lambda: ports(100)),
    ]
    if engine:
        from in_engine import engine as measured

        parts.append(("engine (two minutes)", lambda: measured(40)))
    return parts


def _table(figures: list[Figure]) -> Table:
    table = Table(header_style="bold")
    table.add_column("figure")
    for column in ("median", "quartiles", "bar", "rounds"):
        table.add_column(column, justify="right")
    for figure in figures:
        style = {True: "green", False: "red", None: ""}[figure.met]
        table.add_row(*_cells(figure), style=style)
    return table


def _cells(figure: Figure) -> list[str]:
    low, high = figure.spread
    bar = "" if figure.bar is None else f"{figure.bar:g} {figure.unit}"
    return [
        figure.name,
        f"{figure.median:.3g} {figure.unit}",
        f"{low:.3g} to {high:.3g}",
        bar,
        str(len(figure.values)),
    ]


def _write(described: dict[str, str], figures: list[Figure]) -> None:
    RESULTS.mkdir(exist_ok=True)
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Medians over rounds; what is compared alternates within a round.",
        "",
        "| figure | median | quartiles | bar | rounds |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(figure))} |" for figure in figures),
        "",
        "How each was measured:",
        "",
        *(f"- **{figure.name}**: {figure.how}." for figure in figures),
        "",
        "Machine:",
        "",
        *(f"- {name}: {value}" for name, value in described.items()),
        "",
    ]
    (RESULTS / "results.md").write_text("\n".join(lines), encoding="utf-8")
    entries = [
        {
            "name": figure.name,
            "unit": figure.unit,
            "median": figure.median,
            "quartiles": figure.spread,
            "bar": figure.bar,
            "met": figure.met,
            "rounds": len(figure.values),
            "values": [float(f"{value:.4g}") for value in figure.values],
        }
        for figure in figures
    ]
    text = json.dumps({"machine": described, "figures": entries}, indent=1, ensure_ascii=False)
    (RESULTS / "results.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
