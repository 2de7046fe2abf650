"""What Runner V2 is asked, with a runner made by hand; that it serves traces is tested on the real one."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode

from invivo.interleaver.windows import Window
from invivo.vllm_backend.runner_v2 import AdapterV2, RunnerV2


def test_rows_and_steps_are_in_the_order_of_the_batch() -> None:
    batch = SimpleNamespace(
        req_ids=["decodes", "again", "begins"],
        num_scheduled_tokens=np.array([1, 5, 7], np.int32),
        idx_mapping_np=np.array([2, 3, 0]),
    )
    states = SimpleNamespace(
        num_computed_tokens_np=np.array([0, 99, 12, 0]),
        prompt_len=SimpleNamespace(np=np.array([7, 99, 10, 4])),
    )
    found = AdapterV2(SimpleNamespace(batch=batch, req_states=states)).shares(13)
    assert [(name, share.rows, share.last, share.step) for name, share in found.items()] == [
        ("decodes", Window(0, 1, 13), Window(0, 1, 3), 3),
        ("again", Window(1, 5, 13), Window(1, 1, 3), None),
        ("begins", Window(6, 7, 13), Window(2, 1, 3), 0),
    ]
    assert found["again"].ends_with(1)  # prompt and token in one go, after a preemption


def test_a_step_follows_if_each_request_has_gone_on_by_one_token() -> None:
    def batch(names: str, *, prefill: bool = False) -> Any:
        count = len(names)
        return SimpleNamespace(
            req_ids=[*names],
            num_scheduled_tokens=np.ones(count, np.int32),
            num_tokens=count,
            has_prefill=prefill,
            idx_mapping_np=np.array([ord(name) - ord("a") for name in names]),
        )

    states = SimpleNamespace(
        num_computed_tokens_np=np.array([7, 9], np.int32), prompt_len=SimpleNamespace(np=np.array([4, 4], np.int32))
    )
    runner = SimpleNamespace(batch=batch("ba"), req_states=states)
    adapter = AdapterV2(runner)
    adapter.shares(2)
    states.num_computed_tokens_np += 1
    assert adapter.follows()
    states.num_computed_tokens_np += 1
    assert adapter.follows()
    assert not adapter.follows()  # the same step again
    for other in (batch("ab"), batch("a"), batch("ab", prefill=True)):
        runner.batch = other
        states.num_computed_tokens_np += 1
        assert not adapter.follows()


def test_tokens_are_those_of_requests_that_got_one() -> None:
    waited: list[bool] = []
    output = SimpleNamespace(
        copy_event=SimpleNamespace(synchronize=lambda: waited.append(True)),
        model_runner_output=SimpleNamespace(req_ids=["a", "b"]),
        sampled_token_ids=np.array([[5], [6]]),
        num_sampled_tokens_np=np.array([1, 0]),
    )
    assert AdapterV2(None).tokens(output) == {"a": 5} and waited


def test_the_blocks_of_keys_and_values_of_a_request_are_zeroed() -> None:
    zeroed: list[list[int]] = []
    tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=torch.tensor([[9, 9, 9], [4, 2, 9]])), SimpleNamespace(gpu=torch.ones(2, 3))],
        num_blocks=SimpleNamespace(np=np.array([[3, 2], [0, 0]])),
    )
    runner = SimpleNamespace(
        req_states=SimpleNamespace(req_id_to_index={"a": 1}),
        block_tables=tables,
        kv_block_zeroer=SimpleNamespace(zero_block_ids=zeroed.append),
    )
    AdapterV2(runner).clean("a")
    AdapterV2(runner).clean("unknown")
    assert zeroed == [[2, 4]]


@dataclass(frozen=True)
class Description:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0


class Manager:
    def dispatch(self, num_reqs: int, num_tokens: int, uniform: int, *, max_query_len: int | None) -> Description:
        return Description(CUDAGraphMode.FULL, 8, 8, uniform, max_query_len)


class Plain:
    """As much of the runner as a step needs."""

    def __init__(self) -> None:
        self.model: Any = lambda: self.log.append("model")
        self.cudagraph_manager: Any = Manager()
        self.sampler: Any = lambda logits, batch: SimpleNamespace(sampled_token_ids=logits)
        self.execute_model_state: object = None
        self.log: list[str] = []

    def execute_model(self, scheduled: Any, tensors: Any = None, dummy_run: bool = False, **_: Any) -> Any:
        self.gather_batch_req_state(scheduled, dummy_run)
        self.described = self.cudagraph_manager.dispatch(3, 5, 1, max_query_len=1)
        self.model()
        return "output"

    def gather_batch_req_state(self, scheduled: Any, dummy_run: bool) -> Any:
        return SimpleNamespace(num_tokens=5, has_prefill=True), None

    def sample(self, logits: Any) -> Any:
        return self.sampler(logits, None)


class Traced(RunnerV2, Plain):  # type: ignore[misc]
    pass


class Eagerly:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("eagerly")

    def __exit__(self, *_: object) -> None:
        self.log.append("not any more")


class Told:
    """In the place of `Serving`."""

    def __init__(self, log: list[str], *, active: bool, needs_modules: bool) -> None:
        self.log, self.active, self.needs_modules = log, active, needs_modules

    def eagerly(self) -> Eagerly:
        return Eagerly(self.log)

    def logits(self, logits: int) -> int:
        return logits + 1

    def samples(self, samples: int) -> int:
        return samples * 10

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.log.append(" ".join([name, *(str(arg) for arg in args if isinstance(arg, int))]))


def step(*, dummy_run: bool = False, active: bool = True, needs_modules: bool = False) -> Any:
    runner: Any = Traced()
    runner.serving = Told(runner.log, active=active, needs_modules=needs_modules)
    model, manager, sampler = runner.model, runner.cudagraph_manager, runner.sampler
    assert runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=1), None, dummy_run) == "output"
    runner.sampled = runner.sample(1).sampled_token_ids
    assert (runner.model, runner.cudagraph_manager, runner.sampler) == (model, manager, sampler)
    return runner


def test_a_step_without_modules_keeps_its_graph() -> None:
    runner = step()
    assert runner.log == ["clean", "leave", "admit", "begin 5", "model", "forward_done", "finish_step"]
    assert runner.described.cg_mode == CUDAGraphMode.FULL and runner.sampled == 20


def test_one_with_modules_runs_without_a_graph_and_without_padding() -> None:
    runner = step(needs_modules=True)
    assert runner.log[3:] == ["begin 5", "eagerly", "model", "not any more", "forward_done", "finish_step"]
    assert runner.described == Description(CUDAGraphMode.NONE, 5, 3)


def test_dummy_runs_and_steps_without_blocks_are_left_alone() -> None:
    assert step(dummy_run=True).log == ["model"]
    runner = step(active=False)
    assert runner.log == ["clean", "leave", "admit", "model"] and runner.sampled == 1
