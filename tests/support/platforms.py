"""How processes come to use a platform of `support` instead of vLLM's own."""

from __future__ import annotations

from pathlib import Path


def plugin_folder(folder: Path, platform: str) -> Path:
    """A folder that Python takes for an installed package with the entry point of a platform of `support`."""
    package = folder / f"{platform}-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {platform}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{platform} = support.{platform}:platform\n")
    return folder
