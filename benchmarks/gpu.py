"""The benchmarks of a GPU: one program, one table, one picture, and its part of the page.

    python benchmarks/gpu.py                        all of it (`make bench-gpu DEVICE=cuda`)
    python benchmarks/gpu.py --only decode --write  some parts, put in the place of what they measured last time
    python benchmarks/gpu.py --quick                few rounds, and nothing is written but with --write
    python benchmarks/gpu.py --render               write tables, page and plot again from gpu.json

The exit code says whether everything was measured and is within its bar.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "scripts"))

import run  # noqa: E402
from gpu_bench import GpuBench  # noqa: E402
from gpu_parts import PARTS  # noqa: E402

GPU = run.Kind(
    PARTS,
    GpuBench,
    HERE / "results" / "gpu.json",
    HERE / "results" / "gpu.md",
    HERE.parent / "docs" / "performance.md",
    HERE.parent / "docs" / "performance-gpu.svg",
    "measured-gpu",
    "make bench-gpu",
    ("untraced requests", "untraced requests"),
)

if __name__ == "__main__":
    sys.exit(run.main(GPU))
