"""The arguments of the command `invivo`; what it does is tested where it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from invivo.vllm_backend.cli import _arguments, _positions, app


def test_values() -> None:
    found = _arguments(["max-model-len=2048", "dtype=float32", "enforce_eager=false", "load_format=a=b"])
    assert found == {"max_model_len": 2048, "dtype": "float32", "enforce_eager": False, "load_format": "a=b"}
    assert _arguments([]) == {"enforce_eager": True}
    assert (_positions("all"), _positions("1:"), _positions("-8::2")) == ("all", slice(1, None), slice(-8, None, 2))
    for wrong in (lambda: _arguments(["dtype"]), lambda: _positions("1:x"), lambda: _positions("1:2:3:4")):
        with pytest.raises(typer.BadParameter):
            wrong()


def test_help_and_errors(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "harvest" in run(app, ["--help"]).output
    assert run(app, ["harvest", "--help"], env={"COLUMNS": "200"}).output.count("--") > 10
    missing = run(app, ["harvest", "model", str(tmp_path / "no.txt"), "--port", "x", "--out", str(tmp_path)])
    assert missing.exit_code == 2
