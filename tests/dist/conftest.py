"""The fixture of distributed tests: worker processes that live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.dist.forked_workers import forked_workers
from tests.dist.worker_pool import WorkerPool, Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The pool of a world size, 1 to 4: `workers(3).run(function, *args)`; see `worker_pool`."""
    pools: dict[int, WorkerPool] = {}
    with ExitStack() as stack:

        def pool(world_size: int) -> WorkerPool:
            assert 1 <= world_size <= 4, f"world size {world_size}: pools have 1 to 4 workers"
            if world_size not in pools:
                pools[world_size] = stack.enter_context(WorkerPool(world_size))
            return pools[world_size]

        yield pool


@pytest.fixture
def forked() -> Iterator[None]:
    """Workers that the test's launcher starts are forks: see `forked_workers`."""
    with forked_workers():
        yield
