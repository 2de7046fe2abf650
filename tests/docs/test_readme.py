"""The Python of the README and of docs/ runs as it stands.

The blocks of one page run in order and share their variables, as a reader would try them. They differ from what a
reader does in two ways. ``VLLM(...)`` gives the session's engine of its mode, whatever else it is called with, so that
pages need no model hub and start no engine of their own. And a page may bring along what it takes for granted, in a
comment that is not shown::

    <!-- python
    prompt = "..."
    -->

A block of another language than ``python`` does not run.
"""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^(?:```python|<!-- python)\n(.*?)^(?:```|-->)$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Code and the number of the line before it."""

    code: str
    line: int


def blocks(path: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    return [Block(match.group(1), text.count("\n", 0, match.start(1))) for match in BLOCK.finditer(text)]


def run(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Execute a block with the line numbers that it has in its page, so that tracebacks point there."""
    source = "\n" * block.line + block.code
    name = f"{page.relative_to(ROOT)} (from line {block.line + 1})"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if blocks(page)]


@pytest.mark.engine
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(
    page: Path,
    smollm2: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    engines = {"sync": smollm2}
    if any('mode="async"' in block.code for block in blocks(page)):
        engines["async"] = request.getfixturevalue("async_smollm2")
    monkeypatch.setattr("invivo.VLLM", lambda *_, mode="sync", **__: engines[mode])
    namespace: dict[str, Any] = {"__name__": "__main__", "model": smollm2}
    for block in blocks(page):
        run(block, page, namespace)
    for engine in engines.values():
        engine.check_integrity()


def test_every_page_is_found() -> None:
    assert {page.stem for page in PAGES} >= {"README", "tracing", "errors"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
