"""What of the process a block may touch besides its own values, told from what it is made of.

To give a block torch's generator, modes of its own and a place for what it prints, and to take them back, costs as much
as all else at a port, so it is done only for those that may use them. A block surely does not if no name in its source,
and in that of the functions that travel with it, is one of those below, and it refers to nothing installed but torch's
plain functions and harmless modules of Python.
"""

from __future__ import annotations

import ast
import dis
from functools import lru_cache
from types import CodeType

TORCH = "torch"
"""The entry of `Payload.uses` of a block that may draw from torch's generators."""

MODES = "modes"
"""Of one that may change torch's modes or default dtype."""

PRINTS = "prints"
"""Of one that may print."""

_NONE: frozenset[str] = frozenset()
_ALL = frozenset((TORCH, MODES, PRINTS))

_DRAWING = frozenset(
    """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy cauchy_ dropout dropout_ dropout1d dropout2d
    dropout3d exponential exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_
    fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    geometric geometric_ gru gumbel_softmax lobpcg log_normal log_normal_ lstm miopen_rnn multi_head_attention_forward
    multinomial native_dropout normal normal_ pca_lowrank poisson rand rand_like randint randint_like randn randn_like
    random random_ randperm rnn_relu rnn_tanh rrelu rrelu_ rrelu_with_noise rrelu_with_noise_
    scaled_dot_product_attention svd_lowrank uniform uniform_
    """.split()
)
"""Functions and methods of torch that draw; a test compares them with what torch says of itself."""

_CHANGING = frozenset(
    """
    amp autocast autocast_decrement_nesting autocast_increment_nesting autograd clear_autocast_cache enable_grad
    inference_mode no_grad overrides set_anomaly_enabled set_autocast_cache_enabled set_autocast_cpu_dtype
    set_autocast_cpu_enabled set_autocast_dtype set_autocast_enabled set_autocast_gpu_dtype set_autocast_ipu_dtype
    set_autocast_ipu_enabled set_autocast_xla_dtype set_autocast_xla_enabled set_default_device set_default_dtype
    set_default_tensor_type set_grad_enabled __enter__
    """.split()
)
"""Names by which modes are changed; any `with` may do it too."""

_PRINTING = frozenset(("breakpoint", "help", "input", "print", "stdout"))

_ON_THE_WAY = frozenset(
    """
    Generator compile cuda default_generator distributions fork_rng func get_rng_state hub initial_seed jit library
    manual_seed nn ops quasirandom seed set_rng_state utils vmap _C
    attrgetter eval exec getattr globals importlib methodcaller vars __builtins__ __dict__ __getattribute__ __import__
    """.split()
)
"""Names by which all of these, or the state of the generator, are reached."""

_KINDS: dict[str, frozenset[str]] = {
    **dict.fromkeys(_PRINTING, frozenset((PRINTS,))),
    **dict.fromkeys(_CHANGING, frozenset((MODES,))),
    **dict.fromkeys(_DRAWING, frozenset((TORCH,))),
    **dict.fromkeys(_ON_THE_WAY, _ALL),
}

_HARMLESS = frozenset(
    """
    builtins cmath collections copy dataclasses datetime decimal enum fractions functools itertools json math numbers
    operator re statistics string textwrap time types typing
    torch torch._C torch._tensor torch.fft torch.functional torch.linalg torch.nn.functional torch.special
    """.split()
)


def of_name(name: str) -> frozenset[str]:
    """What something of this name may touch."""
    return _KINDS.get(name, _NONE)


def of_module(module: str) -> frozenset[str]:
    """What may be touched by what a module defines, unless its name says so."""
    return _NONE if module in _HARMLESS or module.partition(".")[0] in ("invivo", "numpy") else _ALL


@lru_cache(maxsize=256)
def of_source(tree: ast.AST) -> frozenset[str]:
    """What a piece of source may touch by what it names, imports and does.

    Args:
        tree: the `with` of a block, whose first item is the trace; or any other piece.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.update(_KINDS.get(node.attr, _NONE))
        elif isinstance(node, ast.Name):
            found.update(_KINDS.get(node.id, _NONE))
        elif isinstance(node, ast.Import):
            found.update(*(of_module(alias.name) | of_name(alias.name) for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            found.update(of_module(node.module or ""), *(of_name(alias.name) for alias in node.names))
        elif isinstance(node, ast.With | ast.AsyncWith) and (node is not tree or len(node.items) > 1):
            found.add(MODES)
    return frozenset(found)


def of_code(code: CodeType) -> frozenset[str]:
    """The same of compiled code, without the code nested in it; any import counts for everything."""
    instructions = code.co_code[::2]
    if _IMPORT in instructions:
        return _ALL
    found = _NONE.union(*map(of_name, code.co_names))
    return found | {MODES} if any(number in instructions for number in _WITH) else found


_IMPORT = dis.opmap["IMPORT_NAME"]
_WITH = [dis.opmap[name] for name in ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL") if name in dis.opmap]
"""Instructions that a `with` begins with, in one Python or another."""
