"""What rots silently: the wheel, the entry point, the public names, and how light `import invivo` is."""

from __future__ import annotations

import ast
import inspect
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from importlib.metadata import entry_points, metadata, version
from pathlib import Path

import pytest

import invivo
import invivo.envoy.errors as errors_module

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]
HEAVY = ("torch", "vllm", "transformers", "numpy", "cloudpickle", "msgspec", "rich", "greenlet", "asyncio", "typer")

PUBLIC = """
    Activations BlockError CaptureError EngineClosedError EngineDiedError ForeignError InternalError InvivoError
    InvivoWarning InvokeError LimitError Local MemoryLimitError MisuseError OutsideBlockError PortError
    PortNotReachedError PortPassedError PreemptedError PromptError RanksError SamplingError SaveError SaveLimitError
    StepError TimeLimitError TransferError UnknownNameError UnsupportedError VLLM VersionError WriteError __version__
    errors harvest save
""".split()


def python(code: str) -> str:
    """What a fresh interpreter prints when it runs `code`."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class TestPublicNames:
    def test_all_is_the_snapshot(self) -> None:
        assert sorted(invivo.__all__) == sorted(PUBLIC)

    def test_dir_shows_them_and_nothing_else(self) -> None:
        assert dir(invivo) == sorted(PUBLIC)

    @pytest.mark.parametrize("name", PUBLIC)
    def test_each_resolves(self, name: str) -> None:
        assert getattr(invivo, name) is not None
        assert name in vars(invivo), "fetched once, then an ordinary attribute"

    def test_every_exception_is_public(self) -> None:
        defined = {name for name, value in vars(errors_module).items() if inspect.isclass(value)}
        assert defined == {name for name in PUBLIC if hasattr(errors_module, name)}

    def test_errors_are_the_same_objects_from_both_places(self) -> None:
        assert invivo.errors is errors_module
        assert invivo.PortError is errors_module.PortError

    def test_a_wrong_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="module 'invivo' has no attribute 'trace'"):
            invivo.trace  # type: ignore[attr-defined]

    def test_checkers_see_the_names_that_exist_at_run_time(self) -> None:
        source = (ROOT / "api" / "__init__.py").read_text(encoding="utf-8")
        assert all(source.count(name) >= 2 for name in PUBLIC), "in __all__ and in the TYPE_CHECKING block"


class TestLightness:
    def test_import_loads_nothing_heavy(self) -> None:
        code = f"import sys; import invivo; print([name for name in {HEAVY} if name in sys.modules])"
        assert python(code) == "[]"

    def test_exceptions_load_nothing_heavy(self) -> None:
        code = f"import sys; from invivo import PortError; print([n for n in {HEAVY} if n in sys.modules])"
        assert python(code) == "[]"

    def test_the_plugin_loads_neither_torch_nor_vllm(self) -> None:
        code = "import sys, invivo.vllm_backend.plugin; print([n for n in ('torch', 'vllm') if n in sys.modules])"
        assert python(code) == "[]"

    def test_import_takes_less_than_50_ms(self) -> None:
        def run(code: str) -> float:
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            return time.perf_counter() - began

        run("import invivo")  # compiles, and warms the disk cache
        pairs = [(run("import invivo"), run("pass")) for _ in range(9)]  # taken in turn: same load for both
        assert statistics.median(loaded - plain for loaded, plain in pairs) < 0.050


class TestMetadata:
    def test_version(self) -> None:
        assert invivo.__version__ == version("invivo") == SETTINGS["project"]["version"]

    def test_requirements_leave_torch_and_vllm_to_the_extras(self) -> None:
        required = metadata("invivo").get_all("Requires-Dist") or []
        assert not [line for line in required if line.startswith(("torch", "vllm")) and "extra ==" not in line]

    def test_entry_point(self) -> None:
        (plugin,) = entry_points(group="vllm.general_plugins", name="invivo")
        assert callable(plugin.load())

    def test_pins_agree_with_the_declared_requirements(self) -> None:
        from packaging.requirements import Requirement

        pins = {}
        for name in ("cpu", "dev", "ray"):
            for line in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
                if line and not line.startswith("#"):
                    package, _, pinned = line.partition("==")
                    assert pinned, f"{name}.txt: {line!r} is not pinned"
                    assert package not in pins, f"{package} is pinned twice"
                    pins[package] = pinned
        project = SETTINGS["project"]
        extras = project["optional-dependencies"]
        for text in [*project["dependencies"], *extras["cpu"], *extras["ray"]]:
            requirement = Requirement(text)
            assert requirement.specifier.contains(pins[requirement.name]), text


class TestPackages:
    def test_every_folder_with_modules_is_listed(self) -> None:
        top = {folder: package for package, folder in FOLDERS.items()}
        found = {
            ".".join([top[path.relative_to(ROOT).parts[0]], *path.relative_to(ROOT).parts[1:-1]])
            for folder in FOLDERS.values()
            for path in (ROOT / folder).rglob("*.py")
        }
        assert found == set(SETTINGS["tool"]["setuptools"]["packages"])

    def test_every_package_has_its_init(self) -> None:
        for package in SETTINGS["tool"]["setuptools"]["packages"]:
            head = max((name for name in FOLDERS if f"{package}.".startswith(f"{name}.")), key=len)
            folder = ROOT.joinpath(FOLDERS[head], *package.removeprefix(head).strip(".").split("."))
            assert (folder / "__init__.py").is_file(), package

    def test_imports_inside_the_folders_are_relative(self) -> None:
        for folder in FOLDERS.values():
            for path in (ROOT / folder).rglob("*.py"):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
                    if isinstance(node, ast.ImportFrom) and not node.level:
                        names = [str(node.module)]
                    roots = {name.partition(".")[0] for name in names}
                    assert not roots & {"invivo", *FOLDERS.values()}, f"{path}:{getattr(node, 'lineno', 0)}"

    def test_the_wheel_holds_every_module(self, tmp_path: Path) -> None:
        checkout = tmp_path / "checkout"  # a build writes beside the sources
        checkout.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, checkout)
        for folder in FOLDERS.values():
            shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
        build = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
        done = subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

        expected = {"invivo/py.typed"}
        for package, folder in FOLDERS.items():
            for path in (checkout / folder).rglob("*.py"):
                expected.add(f"{package.replace('.', '/')}/{path.relative_to(checkout / folder).as_posix()}")
        (wheel,) = (checkout / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected
        (sdist,) = (checkout / "dist").glob("*.tar.gz")
        with tarfile.open(sdist) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        assert {f"{folder}/__init__.py" for folder in FOLDERS.values()} <= names
