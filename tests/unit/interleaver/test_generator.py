"""A block has random numbers of its own, and the engine's go on as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from invivo.interleaver import generator
from invivo.interleaver.generator import SEAT, Draws, Stream


@pytest.fixture(autouse=True)
def _engine_seed() -> Iterator[None]:
    torch.manual_seed(7)
    yield
    SEAT.leave()


def test_streams_and_engine_draw_their_own_numbers() -> None:
    one, other = Stream(1), Stream(2)
    drawn: dict[str, list[float]] = {"one": [], "other": [], "engine": []}
    for _ in range(3):
        SEAT.take(one)
        drawn["one"].append(torch.rand(1).item())
        SEAT.take(other)
        drawn["other"].append(torch.rand(1).item())
        SEAT.leave()
        drawn["engine"].append(torch.rand(1).item())
    expected = {"one": 1, "other": 2, "engine": 7}
    for name, seed in expected.items():
        generator = torch.Generator().manual_seed(seed)
        assert drawn[name] == [torch.rand(1, generator=generator).item() for _ in range(3)]


def test_a_seat_may_be_kept() -> None:
    stream = Stream(1)
    SEAT.take(stream)
    first = torch.rand(1).item()
    assert SEAT.taken is stream
    second = torch.rand(1).item()
    SEAT.leave()
    generator = torch.Generator().manual_seed(1)
    assert [first, second] == [torch.rand(1, generator=generator).item() for _ in range(2)]


def test_every_generator_is_the_blocks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a GPU too; the second one here stands for it."""
    device = torch.Generator().manual_seed(9)
    monkeypatch.setattr(generator, "defaults", lambda: [torch.default_generator, device])
    before = generator.states()

    def draw() -> list[float]:
        return [torch.rand(1).item(), torch.rand(1, generator=device).item()]

    one, other = Stream(1), Stream(2)
    SEAT.take(one)
    first = draw()
    SEAT.take(other)
    assert draw() != first
    SEAT.leave()
    assert generator.states() == before
    SEAT.take(one)
    second = draw()
    SEAT.leave()
    again = Stream(1)
    SEAT.take(again)
    assert [draw(), draw()] == [first, second]


def test_leaving_an_empty_seat_does_nothing() -> None:
    before = torch.get_rng_state()
    SEAT.leave()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_in_training_draws() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).eval()
    draws = Draws(model)
    assert draws.may, "it was not watched yet"

    def watched() -> bool:
        draws.watch()
        model(torch.ones(1, 2))
        draws.see()
        return draws.may

    assert not watched()
    model[1].train()
    draws.look()
    assert draws.may and watched()
    model.eval()
    draws.look()
    assert draws.may, "it drew when it was last watched"
    assert not watched()
