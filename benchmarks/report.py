"""Figures as JSON, and from there as Markdown and as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from measure import Curve, Figure, quartiles

QUICK = "**This was a quick run, with few rounds and few tokens. Its figures are not to be relied on.**"


class Section(msgspec.Struct, frozen=True):
    """What one part of the benchmarks has measured.

    Attributes:
        title: what it is about.
        machine: what it was measured on.
        seconds: how long that took.
        quick: there were few rounds and few tokens.
        figures: its figures.
        curves: how they grow.
    """

    title: str
    machine: dict[str, str]
    seconds: float
    quick: bool
    figures: list[Figure]
    curves: list[Curve]


Sections = Mapping[str, Section]
"""By the name under which `--only` takes them."""


def read(path: Path) -> dict[str, Section]:
    """What an earlier run wrote; nothing if there was none, or one of another form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Section])
    except (FileNotFoundError, msgspec.ValidationError):
        return {}


def encode(sections: Sections) -> bytes:
    """As JSON, with medians and quartiles for other readers."""
    data: dict[str, Any] = msgspec.to_builtins(sections, str_keys=True)
    for name, section in sections.items():
        for figure, entry in zip(section.figures, data[name]["figures"], strict=True):
            entry["values"] = _rounded(figure.values)
            entry |= {"median": figure.median, "quartiles": figure.spread, "met": figure.met}
        for curve, entry in zip(section.curves, data[name]["curves"], strict=True):
            entry["points"] = {str(at): _rounded(values) for at, values in curve.points.items()}
            entry["medians"] = {str(at): median for at, median in curve.medians.items()}
    return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"


def _rounded(values: list[float]) -> list[float]:
    """Four digits of what was measured, and all of what was counted."""
    return [value if value.is_integer() else float(f"{value:.4g}") for value in values]


# --- Markdown


def markdown(sections: Sections, *, how: bool) -> str:
    """Tables of all sections.

    Args:
        sections: what was measured.
        how: with how each figure was measured, and not only what limits it.
    """
    lines = [QUICK, ""] if any(section.quick for section in sections.values()) else []
    for section in sections.values():
        lines += [f"### {section.title[:1].upper()}{section.title[1:]}", ""]
        if section.figures:
            lines += ["| figure | median | quartiles | bar | met | rounds |", "|---|---|---|---|---|---|"]
            lines += [f"| {' | '.join(cells(figure))} |" for figure in section.figures]
            lines += ["", *_explained(section.figures, how), ""]
        for across, curves in by_axis(section.curves).items():
            lines += [*_grown(across, curves), ""]
            lines += [*(f"- **{curve.name}**: {curve.how}." for curve in curves), ""] if how else []
    return "\n".join(lines).strip() + "\n"


def summary(sections: Sections) -> str:
    """How many bars there are and how many are met, and the names of those that are not."""
    barred = [figure for section in sections.values() for figure in section.figures if figure.met is not None]
    missed = [figure for figure in barred if not figure.met]
    said = f"{len(barred) - len(missed)} of {len(barred)} bars are met."
    if missed:
        named = "; ".join(f"{figure.name} ({_value(figure.median, figure.unit)}, {bar(figure)})" for figure in missed)
        said += f" Missed: {named}."
    return said


def machines(sections: Sections) -> str:
    """What it was measured on, as a list."""
    found: dict[str, list[str]] = {}
    for section in sections.values():
        for name, value in section.machine.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    minutes = sum(section.seconds for section in sections.values()) / 60
    lines = [f"- {name}: {', '.join(values)}" for name, values in found.items()]
    return "\n".join([*lines, f"- time that it took: {minutes:.1f} minutes"]) + "\n"


def cells(figure: Figure) -> list[str]:
    """Name, median, quartiles, bar, whether it is met, and rounds."""
    low, high = figure.spread
    met = {True: "yes", False: "**no**", None: ""}[figure.met]
    spread = f"{low:.4g} to {high:.4g}" if len(figure.values) > 1 else ""
    return [figure.name, _value(figure.median, figure.unit), spread, bar(figure), met, str(len(figure.values))]


def bar(figure: Figure) -> str:
    """The bar in words."""
    if figure.bar is None:
        return ""
    return f"at {'least' if figure.least else 'most'} {_value(figure.bar, figure.unit)}"


def by_axis(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    """Curves by what grows in them."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.across, []).append(curve)
    return found


def _value(value: float, unit: str) -> str:
    shown = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}"


def _explained(figures: list[Figure], how: bool) -> list[str]:
    lines = []
    for figure in figures:
        said = [f"{figure.how}."] if how else []
        said += [f"Limited by {figure.limits}."] if figure.limits else []
        if said:
            lines.append(f"- **{figure.name}**: {' '.join(said)}")
    return lines


def _grown(across: str, curves: list[Curve]) -> list[str]:
    points = sorted({at for curve in curves for at in curve.points})
    lines = [f"| {across} | {' | '.join(map(str, points))} |", f"|---{'|---' * len(points)}|"]
    for curve in curves:
        medians = curve.medians
        shown = (_value(medians[at], curve.unit) if at in medians else "" for at in points)
        lines.append(f"| {curve.name} | {' | '.join(shown)} |")
    return lines


# --- in a terminal


def tables(section: Section) -> list[Table]:
    """What a section has measured."""
    made = []
    if section.figures:
        table = Table(title=section.title, title_justify="left", header_style="bold")
        table.add_column("figure")
        for column in ("median", "quartiles", "bar", "met", "rounds"):
            table.add_column(column, justify="right")
        for figure in section.figures:
            style = {True: "green", False: "red", None: ""}[figure.met]
            table.add_row(*(cell.strip("*") for cell in cells(figure)), style=style)
        made.append(table)
    for across, curves in by_axis(section.curves).items():
        table = Table(title=section.title, title_justify="left", header_style="bold")
        table.add_column(across)
        points = sorted({at for curve in curves for at in curve.points})
        for at in points:
            table.add_column(str(at), justify="right")
        for curve in curves:
            spreads = {at: quartiles(values) for at, values in curve.points.items()}
            table.add_row(
                f"{curve.name}, {curve.unit}",
                *(f"{curve.medians[at]:.3g} ({low:.3g} to {high:.3g})" for at, (low, high) in sorted(spreads.items())),
            )
        made.append(table)
    return made
