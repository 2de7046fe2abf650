"""Runs notebooks from a clean kernel and writes what they print back into the files.

python scripts/notebooks.py                   all of notebooks/
python scripts/notebooks.py notebooks/one.ipynb ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quiet import quiet

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 900
"""Seconds that one cell may take; the first of a notebook starts an engine."""


def notebooks() -> list[Path]:
    """The notebooks of the repository, in order of their names."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path) -> Any:
    """Runs a notebook in a kernel of its own and returns the executed notebook; the file is not touched.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message has its source and traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
    )
    return client.execute()


def write(notebook: Any, path: Path) -> None:
    """Writes an executed notebook without what differs from run to run or from machine to machine.

    That is kernel versions, stray metadata, and stderr, where progress is shown.
    """
    import nbformat

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]

    notebook.metadata = nbformat.NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    nbformat.write(notebook, path)


def main(arguments: Iterable[str]) -> int:
    from rich.console import Console

    quiet()  # the kernels inherit it
    console = Console()
    paths = [Path(argument).resolve() for argument in arguments] or notebooks()
    if not paths:
        console.print("notebooks/ holds no notebook yet")
    for path in paths:
        began = time.monotonic()
        with console.status(f"running {path.name}"):
            write(execute(path), path)
        console.print(f"[green]✓[/] {path.name} [dim]{time.monotonic() - began:.0f} s[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
