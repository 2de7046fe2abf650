"""A worker of several that have the model split among them: which of vLLM's layers are split how, and who has which.

Linear layers say it themselves, each class in its own way. What lies between them in the same module (activations,
norms of heads, rotary embeddings, attention) takes and gives what the linear layers beside it give and take; widths
tell which. All else (layers, norms, MLPs as wholes) is whole on every rank, as `interleaver/shards.py` checks. A class
of linear layers that is not known here is an error where one of its ports is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..envoy.address import INPUT, OUTPUT, Port
from ..envoy.errors import UnsupportedError
from ..envoy.tree import ModuleTree
from ..interleaver.bounds import tables
from ..interleaver.hub import Hub
from ..interleaver.layout import SUMMED, WHOLE, Layout, Piece
from ..interleaver.parallel_hub import ParallelHub
from ..interleaver.ranks import GroupRanks
from ..interleaver.shards import Shards
from ..interleaver.staged_hub import Staged, StagedHub, StagedParallelHub
from ..interleaver.stages import Places
from .compat import (
    AttentionLayerBase,
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    MoERunnerInterface,
    QKVParallelLinear,
    ReplicatedLinear,
    RotaryEmbeddingBase,
    RowParallelLinear,
    get_pp_group,
    get_tp_group,
)
from .hubs import whole_hub
from .module_call import call_module

if TYPE_CHECKING:
    from .adapter import RunnerAdapter


def sends_home() -> bool:
    """Whether this worker is the one that sends home what blocks save; all that have a block know it."""
    return bool(get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank)


def make_hub(adapter: RunnerAdapter) -> Hub:
    """The hub of this worker."""
    call = call_module
    model, compiled = adapter.model(), adapter.compiled()
    group, places = get_tp_group(), _places.get(id(model))
    hub: Hub
    if group.world_size == 1:
        hub = whole_hub(adapter) if places is None else StagedHub(model, call, compiled=compiled)
    else:
        on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())
        ranks = GroupRanks(group.cpu_group, group.device_group if on_device else None)
        shards = Shards(ranks, ModelLayouts(model, ranks.size))
        hub = (ParallelHub if places is None else StagedParallelHub)(model, shards, call, compiled=compiled)
    if isinstance(hub, Staged) and places is not None:
        hub.set_stage(model, places, GroupRanks(get_pp_group().cpu_group))
    return hub


_places: dict[int, Places] = {}
"""Of the model of this worker: which stage of the pipeline has which modules; nothing where there is one stage."""


def has_last_layers() -> bool:
    """Whether this worker is of the last stage of the pipeline, or of the only one."""
    return bool(get_pp_group().is_last_rank)


def exchange_trees(worker: Any) -> None:
    """Have the stages of a pipeline tell each other which modules they have, once they have loaded them."""
    group: Any = get_pp_group()
    if group.world_size == 1:
        return
    load = worker.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        done = load(*args, **kwargs)
        model = worker.model_runner.get_model()
        parts = GroupRanks(group.cpu_group).exchange_any((ModuleTree.of(model).modules, tables(model)))
        trees, found = zip(*parts, strict=True)
        _places[id(model)] = Places(group.rank_in_group, trees, found)
        return done

    worker.load_model = load_model


def as_tensor(data: bytes) -> torch.Tensor:
    """Bytes that travel with hidden states. Of an odd length, as vLLM has ranks send parts of what can be halved."""
    size = len(data).to_bytes(8, "big")
    ranks = get_tp_group().world_size
    padding = bytes((1 - len(data) - len(size)) % ranks) if ranks > 1 else b""
    return torch.frombuffer(bytearray(size + data + padding), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes again."""
    data = tensor.cpu().numpy().tobytes()
    return data[8 : 8 + int.from_bytes(data[:8], "big")]


class ModelLayouts:
    """The layers of one model; implements `interleaver.shards.Layouts`.

    Args:
        model: a rank's part of it.
        ranks: how many there are.
    """

    def __init__(self, model: torch.nn.Module, ranks: int) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._ranks = ranks
        self._beside: dict[str, dict[str, Layout]] = {}

    def name(self, port: Port) -> str:
        """See `Layouts`."""
        return type(self._module(port.address)).__name__

    def of(self, port: Port, number: int, tensor: torch.Tensor, *, whole: bool = False) -> Layout:
        """See `Layouts`."""
        module = self._module(port.address)
        if isinstance(module, LinearBase):
            return _of_linear(module, port)
        if isinstance(module, MoERunnerInterface):
            late = port.kind == OUTPUT and getattr(module, "moe_config").skip_final_all_reduce  # noqa: B009
            return SUMMED if late else WHOLE
        between = not any(isinstance(inside, LinearBase) for inside in module.modules())
        if not between or not tensor.is_floating_point():
            return WHOLE
        return self._between(module, port, number, tensor.shape, whole)

    def _module(self, address: str) -> torch.nn.Module:
        return _unwrapped(self._modules[address])

    def _between(self, module: torch.nn.Module, port: Port, number: int, shape: torch.Size, whole: bool) -> Layout:
        """The layout of a linear layer beside this module, whose part (or whole) has the shape."""
        parent, _, name = port.address.rpartition(".")
        if parent not in self._beside:
            self._beside[parent] = dict(self._layouts_in(self._modules[parent])) if parent else {}
        found = {
            key: layout for key, layout in self._beside[parent].items() if layout.fits(shape, self._ranks, whole=whole)
        }
        if len(set(found.values())) > 1:
            flat, of_heads = _named(module, port.kind, number, name)
            named = {key: layout for key, layout in found.items() if key in (flat, of_heads)}
            # Where a rank has one head, its columns are those; heads fit only tensors that have a dimension for them.
            found = {of_heads: named[of_heads]} if of_heads in named else named or found
        layouts = set(found.values())
        if len(layouts) > 1:
            raise UnsupportedError(
                f"{port} holds a tensor of shape {[*shape]} on each rank, which may be a part of several things "
                f"({', '.join(found)}). Read the ports of the layers before or after it."
            )
        return layouts.pop() if layouts else WHOLE

    def _layouts_in(self, parent: torch.nn.Module) -> Iterator[tuple[str, Layout]]:
        """What the split linear layers directly in a module give and take, by name; heads by ``q``, ``k`` and ``v``."""
        for name, child in parent.named_children():
            layer = _unwrapped(child)
            if not isinstance(layer, LinearBase) or _size(layer) == 1 or type(layer) not in _SPLIT:
                continue
            before, after = (_pieces(layer, kind) for kind in (INPUT, OUTPUT))
            for kind, layout in ((INPUT, before), (OUTPUT, after)):
                if layout.pieces:
                    yield f"{name}.{kind}", layout
            if type(layer) is QKVParallelLinear:
                for key, piece, width in zip("qkv", after.pieces, _head_widths(layer), strict=True):
                    yield key, Layout(pieces=(piece,))
                    heads = piece._replace(width=piece.width // width)
                    yield f"{key} heads", Layout(-2, (heads,), last=width)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The layer itself, where LoRA has put another one around it."""
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def _named(module: torch.nn.Module, kind: str, number: int, name: str) -> tuple[str, str]:
    """Which of queries, keys and values a tensor holds, by its place or else by the name of the module: flat, and as
    heads."""
    if isinstance(module, AttentionLayerBase):
        key = "qkv"[number] if kind == INPUT and number < 3 else "q"
    elif isinstance(module, RotaryEmbeddingBase):
        at = number - 1 if kind == INPUT else number  # the positions come first
        key = "qk"[at] if 0 <= at < 2 else ""
    else:
        key = name[:1]
    return (key, f"{key} heads")


def _of_linear(layer: Any, port: Port) -> Layout:
    """What a linear layer takes or gives.

    Raises:
        UnsupportedError: the class is not known.
    """
    if isinstance(layer, ReplicatedLinear) or _size(layer) == 1:
        return WHOLE
    if type(layer) not in _SPLIT:
        raise UnsupportedError(
            f"{port} cannot be read or written: it is split over {_size(layer)} ranks, and how is not known for the "
            f"class {type(layer).__name__}. Read the ports of the module around it."
        )
    if port.kind == OUTPUT and getattr(layer, "gather_output", False) and len(_pieces(layer, OUTPUT).pieces) > 1:
        raise UnsupportedError(
            f"{port}: a {type(layer).__name__} with `gather_output` puts the columns of its parts into another order "
            "than on one rank. Read the ports of the module around it."
        )
    if port.kind == OUTPUT and getattr(layer, "gather_output", False):
        return WHOLE
    return _pieces(layer, port.kind)


def _pieces(layer: Any, kind: str) -> Layout:
    """What a linear layer of a known class takes or gives, if it does not gather that itself."""
    if type(layer) is RowParallelLinear:
        if kind == OUTPUT:
            return WHOLE if layer.reduce_results else SUMMED
        return Layout(pieces=(Piece(layer.input_size_per_partition),)) if layer.input_is_parallel else WHOLE
    if kind == INPUT:
        return WHOLE
    if type(layer) is QKVParallelLinear:
        queries, keys, values = _head_widths(layer)
        copies = layer.num_kv_head_replicas
        return Layout(
            pieces=(
                Piece(layer.num_heads * queries),
                Piece(layer.num_kv_heads * keys, copies),
                Piece(layer.num_kv_heads * values, copies),
            )
        )
    if type(layer) is MergedColumnParallelLinear:
        return Layout(pieces=tuple(Piece(size // layer.tp_size) for size in layer.output_sizes))
    return Layout(pieces=(Piece(layer.output_size_per_partition),))


def _head_widths(layer: Any) -> tuple[int, int, int]:
    return layer.head_size, layer.head_size, layer.v_head_size


def _size(layer: Any) -> int:
    return int(layer.tp_size)


_SPLIT = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
"""The classes whose way of splitting is known; theirs alone, not that of classes made from them."""
