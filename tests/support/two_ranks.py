"""Processes that stand for the ranks of an engine, and run functions of a test's module."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from invivo.interleaver.ranks import GroupRanks


def serve(module: str, size: int, rank: int, rendezvous: str, tasks: Any, answers: Any) -> None:
    """Run what comes in `tasks`, functions of `module` by name that take its `Rank`, until None comes.

    Args:
        module: the test's module.
        size: how many ranks there are.
        rank: which of them this process is.
        rendezvous: a file over which they find each other.
        tasks: a queue of names.
        answers: a queue of pairs of the rank and what its function returned, or the text of its exception.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=size)
    assert torch.distributed.group.WORLD is not None, "it was just made"
    functions, ranks = importlib.import_module(module), GroupRanks(torch.distributed.group.WORLD)
    while (task := tasks.get()) is not None:
        try:
            answers.put((rank, getattr(functions, task)(functions.Rank(ranks))))
        except BaseException as error:
            answers.put((rank, f"{type(error).__name__}: {error}"))
    torch.distributed.destroy_process_group()
