"""Whether a block may draw from torch's random numbers, told from what it is made of.

Giving torch's generator to a block and taking it back costs as much as all else at a port, so it is done only for
those that may draw. A block surely does not if no name in its source, and in that of the functions that travel with it,
is one of torch's that draws, and it refers to nothing installed but torch's plain functions and harmless modules of
Python.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable
from types import CodeType

TORCH = "torch"
"""The entry of `Payload.uses` that says so."""

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

_ON_THE_WAY = frozenset(
    """
    Generator compile cuda default_generator distributions fork_rng func get_rng_state hub initial_seed jit library
    manual_seed nn ops quasirandom seed set_rng_state utils vmap _C
    attrgetter eval exec getattr globals importlib methodcaller vars __builtins__ __dict__ __getattribute__ __import__
    """.split()
)
"""Names by which such functions, or the state of the generator, are reached."""

_HARMLESS = frozenset(
    """
    builtins cmath collections copy dataclasses datetime decimal enum fractions functools itertools json math numbers
    operator re statistics string textwrap time types typing
    torch torch._C torch._tensor torch.fft torch.functional torch.linalg torch.nn.functional torch.special
    """.split()
)


def named(name: str) -> bool:
    """Whether something of this name may draw."""
    return name in _DRAWING or name in _ON_THE_WAY


def harmless(module: str) -> bool:
    """Whether what a module defines draws nothing, unless its name says so."""
    return module in _HARMLESS or module.partition(".")[0] in ("invivo", "numpy")


def in_source(tree: ast.AST) -> bool:
    """Whether a piece of source may draw by what it names or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names: Iterable[str] = (alias.name for alias in node.names)
            if not all(harmless(name) and not named(name) for name in names):
                return True
        elif isinstance(node, ast.ImportFrom):
            if not harmless(node.module or "") or any(named(alias.name) for alias in node.names):
                return True
        elif named(node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""):
            return True
    return False


def in_code(code: CodeType) -> bool:
    """The same of compiled code, without the code nested in it; any import counts."""
    return any(map(named, code.co_names)) or _IMPORT in code.co_code[::2]


_IMPORT = dis.opmap["IMPORT_NAME"]
