"""A tour in the terminal, on a real engine: what a model says, what it says with a part taken out, and layer by layer.

    python scripts/demo.py         (`make demo`)

The same prompt is traced three times on SmolLM2-135M-Instruct in vLLM. The last step is the logit lens: what the model
would say if it stopped after each layer.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from quiet import quiet
from smollm2 import smollm2_path

if TYPE_CHECKING:
    import torch

PROMPT = "The Eiffel Tower is in the city of"
ANSWER = " Paris"
LAYER = 29
"""The layer whose MLP is taken out: the last, where this model makes up its mind (the logit lens shows it)."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,  # compiling takes a minute, and the demo less
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}


def main() -> int:
    quiet()
    from invivo import VLLM

    console = Console()
    console.print(f"[bold]{PROMPT!r}[/]\n")
    with VLLM(str(smollm2_path()), **ENGINE) as model:
        model.dispatch()  # it shows what it is doing
        with console.status("tracing: next token") as status:
            plain = next_token(model)
            status.update("tracing: without one MLP")
            edited = next_token_without(model, LAYER)
            status.update("tracing: logit lens")
            depth = logit_lens(model)
        words = model.tokenizer
        console.print(
            Columns(
                [
                    top_table("as it is", plain, words),
                    top_table(f"layer {LAYER} without its MLP", edited, words),
                ],
                padding=(0, 4),
            )
        )
        console.print()
        console.print(lens_table(depth, words))
    return 0


def next_token(model: Any) -> torch.Tensor:
    """Probabilities of the next token, ``[vocab]``."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        chances: torch.Tensor = model.logits[0].softmax(-1).save()
    return chances


def next_token_without(model: Any, layer: int) -> torch.Tensor:
    """The same, with the output of one layer's MLP set to zero at every position."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        model.model.layers[layer].mlp.output[:] = 0
        chances: torch.Tensor = model.logits[0].softmax(-1).save()
    return chances


def logit_lens(model: Any) -> torch.Tensor:
    """What the model would say after each layer: probabilities ``[layers, vocab]`` at the last position."""
    with model.trace(PROMPT, max_tokens=1, temperature=0):
        rows: Any = []
        for layer in model.model.layers:
            hidden, residual = layer.output  # the residual stream is their sum
            rows.append(model.lm_head(model.model.norm(hidden[-1:] + residual[-1:])).softmax(-1)[0])
        rows.save()
    import torch

    return torch.stack(rows)


def top_table(title: str, chances: torch.Tensor, tokenizer: Any, count: int = 6) -> Table:
    """The most likely tokens with a bar each; the answer is in bold."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, min_width=30)
    values, ids = chances.topk(count)
    for value, token in zip(values.tolist(), ids.tolist(), strict=True):
        text = tokenizer.decode([token])
        style = "bold green" if text == ANSWER else ""
        table.add_row(repr(text), f"{value:6.1%}", "█" * max(1, round(20 * value)), style=style)
    return table


def lens_table(depth: torch.Tensor, tokenizer: Any) -> Table:
    """One row per layer."""
    (answer,) = tokenizer(ANSWER)["input_ids"]
    table = Table(title="logit lens: if the model stopped after this layer", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    table.add_column("top token")
    table.add_column("its probability", justify="right")
    table.add_column(f"of {ANSWER!r}", justify="right")
    for layer, chances in enumerate(depth):
        value, token = chances.max(-1)
        text = tokenizer.decode([int(token)])
        style = "bold green" if text == ANSWER else ""
        table.add_row(str(layer), repr(text), f"{float(value):.1%}", f"{float(chances[answer]):.1%}", style=style)
    return table


if __name__ == "__main__":
    sys.exit(main())
