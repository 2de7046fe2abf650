"""The scripts behind the Makefile: the model, the link tree, the notebook runner, the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import environment
import link
import notebooks
import smollm2

ROOT = Path(__file__).resolve().parents[2]


class TestSmolLM2:
    @pytest.mark.parametrize(
        ("prompt", "continuation"),
        [("The Eiffel Tower is in the city of", " Paris"), ("The capital of Japan is", " Tokyo")],
    )
    def test_it_knows_what_smollm2_knows(self, prompt: str, continuation: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = smollm2.smollm2_path()
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.dtype == torch.float32
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits
        assert tokenizer.decode(logits[0, -1].argmax()) == continuation

    def test_nothing_is_left_of_the_quantization(self) -> None:
        config = json.loads((smollm2.smollm2_path() / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert "quantization_config" not in config

    def test_the_cache_folder_is_the_users(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert smollm2.cache_folder() == tmp_path / "invivo"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert smollm2.cache_folder() == tmp_path / ".cache" / "invivo"

    def test_a_process_that_comes_second_uses_what_the_first_made(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        home = tmp_path / "invivo" / smollm2.FOLDER

        def make(work: Path) -> Path:
            for folder, text in ((work / "mine", "mine"), (home, "theirs")):
                folder.mkdir()
                (folder / "config.json").write_text(text)
            return work / "mine"

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(smollm2, "_make", make)
        assert smollm2.smollm2_path() == home
        assert (home / "config.json").read_text() == "theirs"
        assert list(home.parent.iterdir()) == [home]

    def test_a_failure_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def make(work: Path) -> Path:
            (work / "half").mkdir()
            raise OSError("no network")

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(smollm2, "_make", make)
        with pytest.raises(OSError, match="no network"):
            smollm2.smollm2_path()
        assert not list((tmp_path / "invivo").iterdir())


class TestLink:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        for folder in ("api", "envoy", "tracer", "interleaver", "vllm_backend"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "__init__.py").touch()
        installed = tmp_path / "build" / "__editable__.invivo-0-py3-none-any" / "invivo"
        (installed / "envoy").mkdir(parents=True)
        (installed / "envoy" / "gone.py").symlink_to(tmp_path / "envoy" / "gone.py")
        return tmp_path

    def test_later_files_are_found(self, checkout: Path) -> None:
        link.link(checkout)
        (checkout / "envoy" / "later.py").write_text("x = 1\n")
        code = "import invivo.envoy.later as later; print(later.x)"
        (tree,) = (checkout / "build").iterdir()
        done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"
        assert not (tree / "invivo" / "envoy" / "gone.py").is_symlink()

    def test_twice_is_as_good_as_once(self, checkout: Path) -> None:
        assert link.link(checkout) == link.link(checkout)

    def test_no_install(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        with pytest.raises(SystemExit, match="make install"):
            link.link(tmp_path)


class TestNotebooks:
    def test_a_notebook_is_run_from_a_clean_kernel_and_written_back(self, tmp_path: Path) -> None:
        import nbformat

        path = tmp_path / "one.ipynb"
        cell = nbformat.v4.new_code_cell("print(6 * 7)", id="a")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata={"stray": True}), path)
        assert notebooks.main([str(path)]) == 0
        written = nbformat.read(path, as_version=4)
        assert written.cells[0].outputs[0].text == "42\n"
        assert "stray" not in written.metadata
        before = path.read_bytes()
        notebooks.main([str(path)])
        assert path.read_bytes() == before, "the same run gives the same file"

    def test_an_error_in_a_cell_is_raised(self, tmp_path: Path) -> None:
        import nbformat
        from nbclient.exceptions import CellExecutionError

        path = tmp_path / "one.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", id="a")]), path)
        with pytest.raises(CellExecutionError, match="division by zero"):
            notebooks.execute(path)


class TestEnvironment:
    @pytest.mark.parametrize(
        ("line", "name"),
        [
            ("Collecting torch==2.13.0 (from -r requirements/cpu.txt (line 138))\n", "torch"),
            ("Processing /some/folder/torch-2.13.0-cp311.whl (from -r cpu.txt)\n", "torch-2.13.0-cp311.whl"),
            ("Requirement already satisfied: rich==15.0.0 in ./.venv/lib\n", "rich"),
        ],
    )
    def test_pips_words_about_a_package(self, line: str, name: str) -> None:
        found = environment.NAMED.match(line)
        assert found is not None
        assert found.group(1) == name

    def test_the_pin_of_torch(self) -> None:
        assert environment.torch_pin().startswith("torch==")

    def test_a_failure_shows_what_pip_said(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert environment.install(["--no-deps", "./no/such/folder"], "nothing") != 0
        assert "no/such/folder" in capfd.readouterr().out
