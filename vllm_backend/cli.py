"""The command `invivo`."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from ..envoy.errors import InvivoError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _commands() -> None:
    """Read and edit the internals of a model while vLLM serves it."""


@app.command()
def harvest(
    model: Annotated[str, typer.Argument(help="Name or path of the model, as vLLM takes it.")],
    prompts: Annotated[Path, typer.Argument(help="A .txt file (a prompt in each line) or a .jsonl file.", exists=True)],
    port: Annotated[
        list[str], typer.Option(help="'model.layers.*.mlp.output', 'sum(model.layers.5.output)', ... May be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="The folder that the shards go to.")],
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; else as the model has it.")] = None,
    positions: Annotated[str, typer.Option(help="Tokens with rows: all, last, or a slice such as 1: or -8:")] = "all",
    generate: Annotated[int, typer.Option(help="Tokens to generate after each prompt, which have rows too.")] = 0,
    truncate: Annotated[int | None, typer.Option(help="Cut prompts to so many tokens; 0: to what fits.")] = None,
    field: Annotated[str, typer.Option(help="Where the prompt is in an object of the .jsonl file.")] = "text",
    limit: Annotated[int | None, typer.Option(help="Take the first so many prompts only.")] = None,
    shard_size: Annotated[int, typer.Option(help="Megabytes (MiB) of a shard.")] = 256,
    engine: Annotated[
        list[str], typer.Option(help="An engine argument of vLLM: max_model_len=2048. May be repeated.")
    ] = [],  # noqa: B006  # typer copies it
    progress: Annotated[bool, typer.Option(help="Show how far it is.")] = True,
) -> None:
    """Write activations of a data set to safetensors files; run it again to go on after an interruption."""
    from ..interleaver.harvest.prompts import read
    from .harvest import harvest as run
    from .model import VLLM

    cut: bool | int = False if truncate is None else truncate or True
    try:
        with VLLM(model, **_arguments(engine)) as opened:
            rows = run(
                opened,
                islice(read(prompts, field), limit),
                port,
                out,
                dtype=dtype,
                positions=_positions(positions),
                generate=generate,
                truncate=cut,
                shard_size=shard_size << 20,
                progress=progress,
            )
    except InvivoError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{len(rows):,} rows of {len(rows.columns)} columns from {len(rows.prompts):,} prompts in {out}")


def _arguments(given: list[str]) -> dict[str, Any]:
    """Engine arguments, as Python values where they are JSON.

    A harvest of modules runs every step eagerly, so to compile the model would only take time.
    """
    found: dict[str, Any] = {"enforce_eager": True}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r}: write NAME=VALUE.", param_hint="--engine")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found


def _positions(text: str) -> Any:
    """``all``, ``last``, or a slice written as in brackets."""
    if ":" not in text:
        return text
    try:
        return slice(*(int(part) if part.strip() else None for part in text.split(":")))
    except (ValueError, TypeError):
        raise typer.BadParameter(f"{text!r}: write all, last, or start:stop.", param_hint="--positions") from None


def main() -> None:
    """The entry point of the command."""
    app(prog_name="invivo", args=sys.argv[1:])
