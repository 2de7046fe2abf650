"""What every test shares: the models, each made once a session and only if a test asks for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from support.topology import TOPOLOGIES, cache, engines, in_ray, obstacle

if TYPE_CHECKING:
    from invivo import VLLM, Local
    from support.reference import Reference

# Machines that run tests are slow now and then; a slow example is not a failure, and the same ones run every time.
settings.register_profile("invivo", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("invivo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--topology",
        choices=list(TOPOLOGIES),
        help="run the tests that share an engine on several workers; `make topologies` runs all of these",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With a topology, this process and those below it are told before torch and vLLM are imported."""
    name = config.getoption("topology")
    if name is None:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # workers keep cores busy also when they wait: more threads are much slower
    if in_ray(name) and obstacle(name) is None:
        from support.in_ray import prepare, ray_folder

        folder = ray_folder()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        prepare(folder)


@pytest.fixture(scope="session", autouse=True)
def _topology_is_there(request: pytest.FixtureRequest) -> None:
    name = request.config.getoption("topology")
    if name is not None and (reason := obstacle(name)) is not None:
        pytest.skip(reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--topology``, only what uses an engine of the session."""
    name = config.getoption("topology")
    if name is None:
        return
    kept = []
    for item in items:
        assert isinstance(item, pytest.Function)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        # Some tests take an engine by a parameter; in `case` it is one whose every port must have SmolLM2's nine heads.
        named = {str(value) for key, value in params.items() if key != "case"}
        used = {"smollm2", "async_smollm2"} & {*item.fixturenames, *named}
        if "model" in item.fixturenames and params.get("model") == "vllm":
            used |= {"smollm2"}
        if used and used <= engines(name):
            kept.append(item)
        if name.endswith("pp2") and item.get_closest_marker("calls_later_stages") is not None:
            item.add_marker(pytest.mark.skip(reason="docs/tracing.md says that a pipeline refuses it"))
    items[:] = kept


@pytest.fixture(scope="session")
def topology(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """The checkpoint of the session's engines, and what they are started with beside the usual."""
    from smollm2 import even_smollm2_path, smollm2_path

    name = request.config.getoption("topology")
    if name is None:
        yield str(smollm2_path()), {}
        return
    with pytest.MonkeyPatch.context() as patch:
        # vLLM binds each worker to a NUMA node of its own, and has none start where there are fewer of these.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield str(even_smollm2_path()), TOPOLOGIES[name] | cache(name)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """SmolLM2 in transformers, which the values of every backend are compared with."""
    from smollm2 import smollm2_path
    from support.reference import Reference

    return Reference(smollm2_path())


@pytest.fixture(scope="session")
def smollm2(topology: tuple[str, dict[str, Any]]) -> Iterator[VLLM]:
    """SmolLM2 in a vLLM engine with processes of its own; the one engine of the session."""
    from invivo import VLLM
    from support.contract import ENGINE

    path, workers = topology
    with VLLM(path, **{**ENGINE, **workers}) as model:
        yield model


@pytest.fixture(scope="session")
def async_smollm2(topology: tuple[str, dict[str, Any]]) -> Iterator[VLLM]:
    """SmolLM2 in an asynchronous vLLM engine."""
    from invivo import VLLM
    from support.contract import ENGINE

    path, workers = topology
    with VLLM(path, mode="async", **{**ENGINE, "max_num_seqs": 32, **workers}) as model:
        yield model.dispatch()  # tests have limits of time of their own, in which several workers may not have started


@pytest.fixture(scope="session")
def local_smollm2(reference: Reference) -> Local:
    """The same model in this process; it shares its weights with `reference`, whose hooks come and go."""
    from transformers import AutoTokenizer

    from invivo import Local
    from smollm2 import smollm2_path

    return Local(reference.model, AutoTokenizer.from_pretrained(smollm2_path()))


@pytest.fixture(scope="session", params=["local", pytest.param("vllm", marks=pytest.mark.engine)])
def model(request: pytest.FixtureRequest) -> Any:
    """SmolLM2 on each backend."""
    return request.getfixturevalue("local_smollm2" if request.param == "local" else "smollm2")
