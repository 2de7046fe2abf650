"""Makes an editable install follow the folders of the checkout.

A strict editable install of setuptools is a tree of links, one per file, under ``build/``: checkers such as mypy and
pyright can read it, but a file that is added later is not in it. This script puts a link to the whole folder in place
of each package's folder, so that later files are found without a new install. `make install` runs it.

    python scripts/link.py
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link(root: Path = ROOT) -> list[Path]:
    """Replaces the folders of the link tree by links to those of the checkout, and returns the links."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders: dict[str, str] = settings["tool"]["setuptools"]["package-dir"]
    links: list[Path] = []
    for tree in sorted((root / "build").glob("__editable__.*")):
        for package, folder in folders.items():
            place = tree.joinpath(*package.split("."))
            if "." in package:
                _replace(place, root / folder)
                links.append(place)
                continue
            for file in sorted((root / folder).iterdir()):
                if file.is_file():
                    _replace(place / file.name, file)
                    links.append(place / file.name)
    if not links:
        raise SystemExit("scripts/link.py: there is no editable install under build/; run `make install` first")
    return links


def _replace(place: Path, target: Path) -> None:
    if place.is_symlink() and place.resolve() == target.resolve():
        return
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


if __name__ == "__main__":
    link()
