"""After every test of the contract, nothing of its traces may be left in the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    used = [name for name in ("model", "smollm2", "local_smollm2", "async_smollm2") if name in request.fixturenames]
    yield
    for name in used:
        model = request.getfixturevalue(name)
        model.check_integrity()
