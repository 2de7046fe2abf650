"""Which ports a harvest reads: what users write, as ports of one model in the order in which they fire.

::

    model.layers.5.output           all tensors that the module gives, `...output[0]` and `...output[1]` of a pair
    model.layers.5.output[0]        one part of it
    model.layers.*.mlp.output       the same of every layer
    sum(model.layers.*.output)      the sum of the parts, which of vLLM's layers is the residual stream
    model.layers.5.self_attn        an address alone means its output, as an Envoy does
    logits                          of the last token
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import msgspec

from ...envoy.address import INPUT, LOGITS, OUTPUT, SAMPLES, join, port_at, shown, suggestion
from ...envoy.envoy import Envoy
from ...envoy.errors import ForeignError, MisuseError, PortNotReachedError, UnknownNameError
from ...envoy.tree import ModuleTree

_PARTS = {"input": INPUT, "inputs": INPUT, "output": OUTPUT}
_OF_STEP = {"logits": LOGITS, "model.logits": LOGITS, "samples": SAMPLES, "model.samples": SAMPLES}
_SUM = re.compile(r"sum\((.*)\)")
_INDICES = re.compile(r"(.*?)((?:\[[^\[\]]*\])*)")
_INDEX = re.compile(r"\[([^\[\]]*)\]")


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One port and what is taken of it.

    Attributes:
        name: of the column (of the columns, if it has several parts).
        address: of the module; ``""`` for logits and samples.
        kind: of the port, as in `Port`.
        part: ``input``, ``inputs``, ``output``, ``logits`` or ``samples``.
        path: indices that lead into the port's structure.
        summed: all tensors there are added up.
        exact: it was written without a wildcard.
    """

    name: str
    address: str
    kind: str
    part: str
    path: tuple[int | str, ...] = ()
    summed: bool = False
    exact: bool = True

    @property
    def of_step(self) -> bool:
        """Whether it has one row per step, and not one per token."""
        return self.kind in (LOGITS, SAMPLES)


def choices(asked: object, root: Envoy) -> list[Choice]:
    """The ports that a user asked for.

    Args:
        asked: a text or an Envoy, or several of them.
        root: the Envoy of the model.

    Raises:
        UnknownNameError: a module that the model does not have; the message has the nearest names.
        ForeignError: an Envoy of another model.
        MisuseError: nothing was asked for, the same twice, or something of another kind.
    """
    items: Iterable[object] = [asked] if isinstance(asked, str | Envoy) else asked  # type: ignore[assignment]
    if not isinstance(items, Iterable):
        raise MisuseError(f"`ports` takes names of ports (texts) or Envoys, and got {type(asked).__name__}.")
    found: dict[str, Choice] = {}
    for item in items:
        for choice in _choices(item, root):
            if choice.exact and choice.name in found and found[choice.name].exact:
                raise MisuseError(f"the port `{choice.name}` was asked for twice.")
            found[choice.name] = choice
    if not found:
        raise MisuseError("`ports` is empty: name at least one, such as 'model.layers.*.output'.")
    return list(found.values())


def in_order(found: Iterable[Choice], tree: ModuleTree) -> list[Choice]:
    """The choices in the order in which a model with a known order meets them.

    Of a wildcard, only the modules that run are kept.

    Raises:
        PortNotReachedError: a port that did not fire when the model was run.
    """
    places: dict[str, tuple[int, int]] = {}
    kept, silent = [], []
    for choice in found:
        place = tree.places.get(port_at(choice.address, choice.kind))
        if choice.of_step:
            places[choice.name] = (1, choice.kind == SAMPLES)
        elif place is not None:
            places[choice.name] = (0, place[0])
        else:
            silent.append(choice)
            continue
        kept.append(choice)
    wrong = next((choice for choice in silent if choice.exact or not kept), None)
    if wrong is not None:
        raise PortNotReachedError(
            f"`{wrong.name}` has nothing to give: {shown(wrong.address)} "
            f"({tree.modules[wrong.address].class_name}) did not run as a module when the model was run. The inner "
            "model, lists of layers and `lm_head` never do; take a module in it or around it."
        )
    return sorted(kept, key=lambda choice: places[choice.name])


def _choices(item: object, root: Envoy) -> list[Choice]:
    if isinstance(item, Envoy):
        if item.root is not root:
            raise ForeignError(
                f"the Envoy `{item.address or 'model'}` belongs to another model than the one harvested."
            )
        if not item.address:
            raise MisuseError("the whole model has no output to harvest: name its modules, or 'logits'.")
        return [Choice(f"{item.address}.output", item.address, OUTPUT, "output")]
    if not isinstance(item, str):
        raise MisuseError(
            f"a port is a text, such as 'model.layers.5.output', or an Envoy; got {type(item).__name__}. What a port "
            "holds exists only while the model runs, so write it without reading it."
        )
    text = item.strip()
    summed = _SUM.fullmatch(text)
    inner = summed[1].strip() if summed is not None else text
    if inner in _OF_STEP:
        kind = _OF_STEP[inner]
        return [Choice(kind, "", kind, kind)]
    matched = _INDICES.fullmatch(inner)
    assert matched is not None, "every text matches"
    address, _, part = matched[1].rpartition(".")
    indices = matched[2]
    if part not in _PARTS:  # brackets behind a module count its children
        address, part, indices = matched[1] + matched[2], "output", ""
    path = tuple(_index(text) for text in _INDEX.findall(indices))
    pattern = _INDEX.sub(r".\1", address)
    found = []
    for concrete in _addresses(pattern, root._tree, text):
        name = f"{concrete}.{part}{indices}"
        exact = not _is_wild(pattern)
        named = f"sum({name})" if summed is not None else name
        found.append(Choice(named, concrete, _PARTS[part], part, path, summed is not None, exact))
    return found


def _addresses(pattern: str, tree: ModuleTree, asked: str) -> list[str]:
    """The modules that a pattern names, in the tree's order; `*` stands for a part of one name."""
    found = [""]
    for component in pattern.split("."):
        if component.startswith("-") and component[1:].isdigit():
            found = [tree.item(address, int(component)) for address in found]
            continue
        following = [
            join(address, name)
            for address in found
            for name in tree.modules[address].children
            if fnmatchcase(name, component)
        ]
        if not following:
            known = tuple(dict.fromkeys(name for address in found for name in tree.modules[address].children))
            where = shown(found[0]) + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
            raise UnknownNameError(
                f"the port `{asked}`: {where} has no module `{component}`.{suggestion(component, known)}"
            )
        found = following
    return found


def _is_wild(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?")


def _index(text: str) -> int | str:
    bare = text.strip().strip("'\"")
    return int(bare) if bare.lstrip("-").isdigit() else bare
