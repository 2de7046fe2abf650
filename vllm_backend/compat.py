"""Every name of vLLM that is not part of its documented interface, in one place.

Import it only after `version.check_version` has passed. Sources are given as files of vLLM 0.32.
"""

from __future__ import annotations

from vllm import envs
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_pp_group,
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.ir import enable_torch_wrap
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT as ROTARY_EMBEDDINGS
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.worker_base import WorkerWrapperBase

__all__ = [
    "ROTARY_EMBEDDINGS",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncModelRunnerOutput",
    "AsyncScheduler",
    "AttentionLayerBase",
    "CUDAGraphMode",
    "ChunkedLocalAttentionSpec",
    "ColumnParallelLinear",
    "CompilationMode",
    "CustomOp",
    "EngineArgs",
    "EngineDeadError",
    "FullAttentionSpec",
    "IrOpPriorityConfig",
    "LinearBase",
    "MLAAttentionSpec",
    "MergedColumnParallelLinear",
    "MoERunnerInterface",
    "ModelRunnerOutput",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "ParallelLMHead",
    "PauseState",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "Request",
    "RequestOutputCollector",
    "RequestOutputKind",
    "RequestStatus",
    "RotaryEmbeddingBase",
    "RowParallelLinear",
    "SamplerOutput",
    "Scheduler",
    "SchedulerOutput",
    "SchedulingPolicy",
    "SlidingWindowSpec",
    "TorchCompileWithNoGuardsWrapper",
    "UniformTypeKVCacheSpecs",
    "VLLMValidationError",
    "VllmConfig",
    "WorkerWrapperBase",
    "current_platform",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "enable_torch_wrap",
    "envs",
    "get_forward_context",
    "get_pp_group",
    "get_tp_group",
    "init_distributed_environment",
    "initialize_model",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "set_current_vllm_config",
    "set_forward_context",
]
