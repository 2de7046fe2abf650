"""The figures as one picture: ratios with their bars, and how things grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measure import Curve, Figure
from report import Sections, by_axis

MET, MISSED, WATCHED, BAR = "#2a7f62", "#c1443c", "#8a93a0", "#1c1f24"
LINES = ("#2a7f62", "#3b6fb6", "#b6742a", "#7a4fa3", "#c1443c", "#4a9db0", "#6b6f76")


def draw(path: Path, sections: Sections, over: tuple[str, str] = ("plain vLLM", "plain eager vLLM")) -> None:
    """Write the picture; the same figures give the same file.

    Args:
        path: its place.
        sections: what was measured.
        over: what the ratios on the left and the curves on the right are taken over.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    ratios = [one for section in sections.values() for one in section.figures if one.unit == "x" and one.least]
    grown = by_axis(curve for section in sections.values() for curve in section.curves)
    style: Any = {"svg.hashsalt": "invivo", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8}
    spines = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    with plt.rc_context(style | spines):
        height = max(1.2 + 0.24 * len(ratios), 2.3 * len(grown), 2.0)
        made = plt.figure(figsize=(10, height), layout="constrained")
        halves: Any = made.subfigures(1, 2, width_ratios=(1.15, 1))
        left, right = halves
        _ratios(left.subplots(), ratios, over[0])
        if grown:
            axes = right.subplots(len(grown), 1, squeeze=False)[:, 0]
            for axis, (across, curves) in zip(axes, grown.items(), strict=True):
                _curves(axis, across, curves, over[1])
        made.savefig(path, metadata={"Date": None})
        plt.close(made)


def _ratios(axis: Any, figures: list[Figure], over: str) -> None:
    axis.set_title(f"throughput over {over}; dark marks are the bars")
    colors = [{True: MET, False: MISSED, None: WATCHED}[figure.met] for figure in figures]
    low = [figure.median - figure.spread[0] for figure in figures]
    high = [figure.spread[1] - figure.median for figure in figures]
    places = range(len(figures))
    medians = [figure.median for figure in figures]
    axis.barh(places, medians, color=colors, height=0.7, xerr=([max(v, 0) for v in low], [max(v, 0) for v in high]))
    for place, figure in zip(places, figures, strict=True):
        axis.text(0.01, place, f"{figure.median:.2f}", va="center", color="white", fontsize=7)
        if figure.bar is not None:
            axis.plot([figure.bar, figure.bar], [place - 0.45, place + 0.45], color=BAR, linewidth=2)
    axis.axvline(1, color=WATCHED, linewidth=0.8, zorder=0)
    axis.set_yticks(places, [figure.name for figure in figures])
    axis.invert_yaxis()


def _curves(axis: Any, across: str, curves: list[Curve], over: str) -> None:
    for number, curve in enumerate(curves):
        medians = curve.medians
        axis.plot(
            list(medians), list(medians.values()), marker="o", markersize=3, label=curve.name, color=LINES[number % 7]
        )
    axis.set_title(f"{curves[0].unit}, by {across}")
    if curves[0].unit == "x":
        points = sorted({at for curve in curves for at in curve.points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(points, [str(at) for at in points])
        axis.minorticks_off()
        axis.axhline(1, color=WATCHED, linewidth=0.8, zorder=0)
        axis.set_title(f"throughput over {over}, by {across}")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6, frameon=False, ncols=2)
