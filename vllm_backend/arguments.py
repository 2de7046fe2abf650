"""Engine arguments: the user's, checked, together with invivo's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..envoy.address import suggestion
from ..envoy.errors import MisuseError, UnsupportedError
from ..interleaver.limits import Limits
from .compat import CompilationMode, EngineArgs, current_platform, envs
from .settings import KEY, SCHEDULER, settings

if TYPE_CHECKING:
    from .compat import VllmConfig

_WRONG_UNDER = {
    "speculative_config": "with speculative decoding one forward holds several steps, some of them on tokens that are "
    "rejected later, so a block would see rows that are not its own steps",
    "enable_dbo": "dual-batch overlap runs the halves of a batch at the same time",
    "decode_context_parallel_size": "context parallelism spreads the rows of one request over ranks",
    "prefill_context_parallel_size": "context parallelism spreads the rows of one request over ranks",
}

_WORKERS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "distributed_executor_backend",
)
"""What says how many workers an engine has, and how they share the model."""

_SPLIT = ("tensor_parallel_size", "pipeline_parallel_size")


def engine_arguments(given: dict[str, Any], limits: Limits, *, streams: bool = False) -> dict[str, Any]:
    """The arguments of a trace-ready engine, whose blocks have these limits.

    Args:
        given: the user's.
        limits: of the blocks.
        streams: the engine gives outputs while requests run.

    Raises:
        MisuseError: an unknown argument.
        UnsupportedError: one that cannot go together with traces; the message says why.
    """
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name, value in given.items():
        if name not in known:
            raise MisuseError(f"unknown engine argument `{name}`.{suggestion(name, known)}")
        if name in _WRONG_UNDER and value not in (None, False, 1):
            raise UnsupportedError(f"`{name}` cannot be used with traces: {_WRONG_UNDER[name]}.")
        if name == "distributed_executor_backend" and value not in (None, "mp", "uni", "ray"):
            raise UnsupportedError(
                f"`{name}={value!r}`: traces were not tried with this executor. Leave it out: vLLM starts processes."
            )
        if name == "distributed_executor_backend" and value == "ray":
            check_ray()
        if name == "data_parallel_backend" and value != "mp":
            raise UnsupportedError(
                f"`{name}={value!r}`: engines that run in Ray cannot be watched as processes can, so a trace would "
                "wait for ever for one that has died. Leave it out: vLLM starts processes."
            )
        if name == "data_parallel_size" and value != 1 and not streams:
            raise UnsupportedError(
                f"`{name}={value}`: vLLM has several engines of one model for asynchronous callers only. Pass "
                '`mode="async"`.'
            )
    if streams and given.get("stream_interval") not in (None, 1):
        raise UnsupportedError(
            "`stream_interval`: what a trace streams goes with the output of its step, and every step needs one."
        )
    if given.get("scheduler_cls") is not None:
        raise UnsupportedError("`scheduler_cls`: invivo needs its own scheduler, to end requests from a block.")
    additional = {**(given.get("additional_config") or {}), KEY: settings(limits)}
    split = any((given.get(name) or 1) != 1 for name in _SPLIT)
    ahead = {"async_scheduling": False} if split and given.get("async_scheduling") is None else {}
    return {**given, **ahead, "scheduler_cls": SCHEDULER, "additional_config": additional}


def check_config(config: VllmConfig) -> None:
    """Refuse what vLLM makes of the arguments where traces could not be served.

    Raises:
        UnsupportedError: the model is compiled in a way that no engine step can do without, or see `check_split`.
    """
    check_split(config, v2=config.parallel_config.world_size > 1 and config.use_v2_model_runner)
    if config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE:
        raise UnsupportedError(
            "the compilation mode STOCK_TORCH_COMPILE: every engine step runs the compiled model, whose modules cannot "
            "be met. Leave `compilation_config` out, or pass `enforce_eager=True`."
        )


def unsplit(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an engine with the same model in one piece."""
    return {name: value for name, value in arguments.items() if name not in _WORKERS}


def check_ray() -> None:
    """Refuse Ray where it is not there, or where workers run in another way than in processes of vLLM's.

    Raises:
        UnsupportedError: see above; the message says why.
    """
    what = '`distributed_executor_backend="ray"`'
    if find_spec("ray") is None:
        raise UnsupportedError(f"{what}: Ray is not installed. `pip install 'invivo[ray]'` does it.")
    if not current_platform.ray_device_key:
        raise UnsupportedError(
            f"{what}: vLLM does not run workers in Ray on this platform ({current_platform.device_name}), for which it "
            "knows no device to ask Ray for. Leave it out: vLLM starts processes."
        )
    if not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        raise UnsupportedError(
            f"{what} with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0: vLLM's older executor runs the model on a thread where "
            "blocks cannot be reached. Unset that variable."
        )


def check_split(config: VllmConfig, *, v2: bool) -> None:
    """Refuse workers that have a part of a model where blocks could come to differ between them.

    Raises:
        UnsupportedError: they use Model Runner V2, or prepare steps ahead, or see `check_ray`.
    """
    if config.parallel_config.use_ray:
        check_ray()
    if config.parallel_config.world_size == 1:
        return
    if v2 or config.scheduler_config.async_scheduling:
        raise UnsupportedError(
            "an engine of several workers is traced on Model Runner V1 and without asynchronous scheduling only: "
            "elsewhere, what a worker has of a step when its blocks run depends on its own speed. Set "
            "VLLM_USE_V2_MODEL_RUNNER=0 in the environment, and leave `async_scheduling` out."
        )
