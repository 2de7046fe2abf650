"""The traces that are measured, as a user would write them: an invoke for each prompt, a block for each invoke."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bench import LAYERS, WIDTH

MIDDLE = 15
VECTOR = torch.linspace(-1e-3, 1e-3, WIDTH)

Invoke = Callable[[Any, Any, list[int]], Any]
"""Makes an invoke: of the model, the tracer, and a prompt."""


def traced(model: Any, prompts: list[list[int]], tokens: int, invoke: Invoke) -> float:
    """Seconds from the outer `with` to its end, when everything is home."""
    began = time.perf_counter()
    with model.trace(max_tokens=tokens, temperature=0, ignore_eos=True) as tracer:
        for prompt in prompts:
            invoke(model, tracer, prompt)
    took = time.perf_counter() - began
    for made in tracer.invokes:
        assert len(made.result.outputs[0].token_ids) == tokens
        kept = made.saves.get("kept")
        assert kept is None or invoke not in PER_STEP or len(kept) == tokens
    return took


# --- at every step


def logits(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            model.logits


def read_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            model.model.layers[MIDDLE].output[0]


def read_all(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            for layer in model.model.layers:
                layer.output[0]


def save_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = []
        for _ in tracer.iter[:]:
            kept.append(model.model.layers[MIDDLE].output[0])
        kept.save()


def save_all(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = []
        for _ in tracer.iter[:]:
            kept.append([layer.output[0] for layer in model.model.layers])
        kept.save()


def steer_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        for _ in tracer.iter[:]:
            hidden, _residual = model.model.layers[MIDDLE].output
            hidden += VECTOR


PER_STEP = (logits, read_one, read_all, save_one, save_all, steer_one)


def read_ports(count: int) -> Invoke:
    """A block that reads this many ports at every step: of the layers, or of the layers and what is in them."""
    if count == LAYERS:
        return read_all
    if count < LAYERS:

        def some(model: Any, tracer: Any, prompt: list[int]) -> Any:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    for at in range(count):
                        model.model.layers[at].output[0]

        return some

    def more(model: Any, tracer: Any, prompt: list[int]) -> Any:
        with tracer.invoke(prompt):
            for _ in tracer.iter[:]:
                for layer in model.model.layers:
                    layer.self_attn.output
                    layer.mlp.output
                    layer.output[0]

    assert count == 3 * LAYERS, "three of each layer"
    return more


# --- of the prompt


def last_of_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = model.model.layers[MIDDLE].output[0][-1]
        kept.save()


def last_of_all(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = [layer.output[0][-1] for layer in model.model.layers]
        kept.save()


def whole_one(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = model.model.layers[MIDDLE].output[0]
        kept.save()


def whole_all(model: Any, tracer: Any, prompt: list[int]) -> Any:
    with tracer.invoke(prompt):
        kept: Any = [layer.output[0] for layer in model.model.layers]
        kept.save()
