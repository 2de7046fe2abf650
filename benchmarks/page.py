"""`docs/performance.md`: its words are written by hand, its figures by the program, between comments of their own.

<!-- measured: NAME -->
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import report


def parts(sections: report.Sections) -> dict[str, str]:
    """What belongs between the comments, by name."""
    return {
        "summary": report.summary(sections) + "\n",
        "figures": report.markdown(sections, how=False),
        "method": _method(sections),
        "machine": report.machines(sections),
    }


def filled(text: str, made: Mapping[str, str], mark: str = "measured") -> str:
    """A page with its parts put in.

    Args:
        text: the page.
        made: the parts by name.
        mark: what their comments begin with.

    Raises:
        ValueError: the page does not have exactly these parts.
    """
    part = re.compile(rf"(<!-- {mark}: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    found = [name for _, name, _ in part.findall(text)]
    if sorted(found) != sorted(made):
        raise ValueError(f"the page has the parts {sorted(found)}, and there are {sorted(made)}")
    return part.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n{match[3]}", text)


def write(path: Path, sections: report.Sections, mark: str = "measured") -> None:
    """Put the parts into the page at `path`; see `filled`."""
    path.write_text(filled(path.read_text(encoding="utf-8"), parts(sections), mark), encoding="utf-8")


def _method(sections: report.Sections) -> str:
    """How each figure was measured."""
    lines = []
    for section in sections.values():
        lines += [f"- **{figure.name}**: {figure.how}." for figure in section.figures]
        lines += [f"- **{curve.name}**, by {curve.across}: {curve.how}." for curve in section.curves]
    return "\n".join(lines) + "\n"
