"""Engine arguments that depend on what is installed, and where."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from invivo import UnsupportedError
from invivo.vllm_backend import arguments
from invivo.vllm_backend.settings import LIMITS

RAY = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("installed", "device", "newer", "message"),
    [
        (False, "GPU", True, r"Ray is not installed. `pip install 'invivo\[ray\]'` does it"),
        (True, "", True, r"vLLM does not run workers in Ray on this platform \(cpu\)"),
        (True, "GPU", False, "Unset that variable"),
    ],
)
def test_where_ray_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: bool, device: str, newer: bool, message: str
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(ray_device_key=device, device_name="cpu"))
    monkeypatch.setattr(arguments, "envs", SimpleNamespace(VLLM_USE_RAY_V2_EXECUTOR_BACKEND=newer))
    with pytest.raises(UnsupportedError, match=message):
        arguments.engine_arguments(RAY, LIMITS)


def test_where_ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: True)
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(ray_device_key="GPU"))
    monkeypatch.setattr(arguments, "envs", SimpleNamespace(VLLM_USE_RAY_V2_EXECUTOR_BACKEND=True))
    assert arguments.engine_arguments(RAY, LIMITS)["async_scheduling"] is False
