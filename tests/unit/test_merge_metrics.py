"""The metrics of many ranks are those of one, and only the first rank holds them all."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from dlrm import merge_metrics
from dlrm.merge_metrics import FiguresOnly, merge_on_first
from dlrm.metrics import BinaryMetrics
from tests.thread_ranks import ThreadRank, run_ranks

ROUND_BYTES = 1000


def samples(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, many of them tied between ranks, and labels."""
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randint(-3000, 3000, (count,), generator=generator).float() / 500
    return logits, (torch.rand(count, generator=generator) < logits.sigmoid()).float()


def of_ranks(counts: list[int], dtypes: list[torch.dtype] | None = None) -> BinaryMetrics:
    """All ranks' samples in one."""
    metrics = BinaryMetrics()
    for rank, count in enumerate(counts):
        logits, labels = samples(rank, count)
        metrics.update(logits.to((dtypes or [torch.float32] * len(counts))[rank]), labels)
    return metrics


@pytest.mark.parametrize("counts", [[700, 1500], [0, 40, 3000], [900, 0, 1, 5000], [3000, 0]])
def test_f36_ranks_come_to_the_figures_of_one(counts: list[int]) -> None:
    """To the bit, in as many rounds as it takes."""
    expected = of_ranks(counts)

    def run(comm: ThreadRank) -> tuple[Any, Any]:
        metrics = BinaryMetrics()
        metrics.update(*samples(comm.rank, counts[comm.rank]))
        merged = merge_on_first(metrics, comm)
        assert isinstance(merged, FiguresOnly) == (comm.rank > 0)
        return merged.result(), merged.roc_curve() if comm.rank == 0 else None

    with patch.object(merge_metrics, "_ROUND_BYTES", ROUND_BYTES):
        results = run_ranks(len(counts), run)
    for result, curve in results:
        assert result == expected.result()
        assert curve in (expected.roc_curve(), None)


def test_f36_ranks_with_other_types_of_logits() -> None:
    """A rank without samples has fp32, whatever the others have."""
    dtypes = [torch.float32, torch.float64]
    expected = of_ranks([300, 200], dtypes).result()

    def run(comm: ThreadRank) -> Any:
        metrics = BinaryMetrics()
        logits, labels = samples(comm.rank, [300, 200][comm.rank])
        metrics.update(logits.to(dtypes[comm.rank]), labels)
        return merge_on_first(metrics, comm).result()

    assert run_ranks(2, run) == [expected, expected]


def test_f36_no_histogram_travels_as_an_object_nor_to_every_rank() -> None:
    """At 1TB scale each would be gigabytes, on every rank as many times as there are ranks."""
    counts = [2000, 3000, 4000]

    def run(comm: ThreadRank) -> tuple[int, int]:
        metrics = BinaryMetrics()
        metrics.update(*samples(comm.rank, counts[comm.rank]))
        pickled: list[int] = []
        gather = comm.all_gather_object

        def watched(value: Any) -> list[Any]:
            pickled.append(len(repr(value)))
            return gather(value)

        with patch.object(comm, "all_gather_object", watched):
            merge_on_first(metrics, comm)
        return max(pickled), comm.counters.sent_bytes["other"]

    found = run_ranks(3, run)
    assert max(size for size, _ in found) < 1000
    assert found[0][1] == 0, "the first rank sends nothing"
    for rank in (1, 2):
        assert 0 < found[rank][1] <= counts[rank] * 20
