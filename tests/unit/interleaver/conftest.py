"""What the tests of the hub share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.hub_batch import Batch


@pytest.fixture
def batch() -> Iterator[Batch]:
    batch = Batch()
    yield batch
    for request in list(batch.hub.mediators):
        batch.hub.end(request, "result")
        batch.hub.remove(request)
    batch.hub.check_integrity()
