"""The benchmarks: one program, one table, one page.

    python benchmarks/run.py                       all of it (`make bench`): benchmarks/results/, docs/performance.*
    python benchmarks/run.py --only decode single  some parts, shown and not written
    python benchmarks/run.py --only decode --write the same, and put in the place of what they measured last time
    python benchmarks/run.py --quick               few rounds and few tokens: does it run?
    python benchmarks/run.py --render              write tables, page and plot again from results.json

The exit code says whether everything was measured and is within its bar.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
JSON, TABLE = HERE / "results" / "results.json", HERE / "results" / "results.md"
PAGE, PLOT = HERE.parent / "docs" / "performance.md", HERE.parent / "docs" / "performance.svg"
sys.path.append(str(HERE.parent / "scripts"))

import page  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
from bench import Bench  # noqa: E402
from measure import Curve, Figure, Watch, machine  # noqa: E402
from parts import PARTS  # noqa: E402
from quiet import quiet  # noqa: E402

PAUSE = 0.5
"""Seconds between two looks at the progress: showing it takes time from what is measured."""


class Kind(NamedTuple):
    """A set of benchmarks.

    Attributes:
        parts: by the names that `--only` takes.
        bench: makes what they share.
        json, table, page, plot: the files that are written.
        mark: of the parts of the page (`page.filled`).
        command: what measures everything.
        over: see `plot.draw`.
    """

    parts: Mapping[str, Any]
    bench: Callable[[bool, Watch], Any]
    json: Path
    table: Path
    page: Path
    plot: Path
    mark: str
    command: str
    over: tuple[str, str] = ("plain vLLM", "plain eager vLLM")


def _here() -> Kind:
    """Those of this program."""
    return Kind(PARTS, Bench, JSON, TABLE, PAGE, PLOT, "measured", "make bench")


def main(kind: Kind | None = None) -> int:
    kind = kind or _here()
    options = _options(kind)
    quiet()
    console = Console()
    console.width = max(console.width, 110)
    if options.render:
        _write(report.read(kind.json), kind)
        return 0
    write = options.write or not (options.only or options.quick)
    keep = partial(_keep, kind=kind) if write else None
    measured, failed = _measure(console, options.only or list(kind.parts), options.quick, keep, kind)
    console.print(f"[dim]{', '.join(f'{name} {value}' for name, value in machine().items())}[/]")
    console.print(report.summary(measured).replace("[", "\\["))
    missed = any(figure.met is False for section in measured.values() for figure in section.figures)
    return int(missed or failed)


def _options(kind: Kind | None = None) -> Namespace:
    parts = (kind or _here()).parts
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    described = "; ".join(f"{name}: {part.title}" for name, part in parts.items())
    parser.add_argument("--only", nargs="+", choices=list(parts), metavar="PART", help=described)
    parser.add_argument("--quick", action="store_true", help="few rounds and few tokens, and nothing is written")
    parser.add_argument("--write", action="store_true", help="write what was measured also if it was not everything")
    parser.add_argument("--render", action="store_true", help="measure nothing, write everything from results.json")
    return parser.parse_args()


def _measure(
    console: Console,
    names: list[str],
    quick: bool,
    keep: Callable[[str, report.Section], None] | None = None,
    kind: Kind | None = None,
) -> tuple[dict[str, report.Section], bool]:
    """The sections that could be measured, shown and kept as they come, and whether one could not."""
    measured: dict[str, report.Section] = {}
    kind, failed = kind or _here(), False
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        shown = 0.0

        def watch(what: str, done: int, total: int) -> None:
            nonlocal shown
            if not done or time.monotonic() - shown > PAUSE:
                progress.update(task, description=f"{name}: {what}", completed=done, total=total, refresh=True)
                shown = time.monotonic()

        bench = kind.bench(quick, watch)
        try:
            for name in names:
                task = progress.add_task(name)
                described, began = machine(), time.monotonic()
                try:
                    found = kind.parts[name].measure(bench)
                except Exception:
                    failed = True
                    console.print(f"[red]{name} could not be measured:[/]")
                    console.print_exception()
                    continue
                finally:
                    progress.remove_task(task)
                section = report.Section(
                    kind.parts[name].title,
                    described,
                    round(time.monotonic() - began, 1),
                    quick,
                    [one for one in found if isinstance(one, Figure)],
                    [one for one in found if isinstance(one, Curve)],
                )
                measured[name] = section
                if keep is not None:
                    keep(name, section)
                for table in report.tables(section):
                    console.print(table)
                console.print(f"[dim]{name}: {section.seconds:.0f} s[/]")
        finally:
            bench.close()
    return measured, failed


def _keep(name: str, section: report.Section, kind: Kind) -> None:
    """Put one section in the place of what it was: what is measured stays, whatever ends the program."""
    known = report.read(kind.json) | {name: section}
    _write({name: known[name] for name in kind.parts if name in known}, kind)


def _write(sections: dict[str, report.Section], kind: Kind | None = None) -> None:
    kind = kind or _here()
    kind.json.parent.mkdir(exist_ok=True)
    kind.json.write_bytes(report.encode(sections))
    sections = report.read(kind.json)  # whose values are rounded: everything is to say the same
    made = report.markdown(sections, how=True)
    head = f"# Benchmarks\n\nWritten by `{kind.command}`; [performance.md](../../docs/performance.md) says more.\n"
    kind.table.write_text(f"{head}\n{report.summary(sections)}\n\n{made}\n### Machine\n\n{report.machines(sections)}")
    page.write(kind.page, sections, kind.mark)
    plot.draw(kind.plot, sections, kind.over)


if __name__ == "__main__":
    sys.exit(main())
