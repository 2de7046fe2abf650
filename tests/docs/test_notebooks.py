"""Every notebook runs from a clean kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from notebooks import execute, notebooks


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_notebook(path: Path) -> None:
    execute(path)
