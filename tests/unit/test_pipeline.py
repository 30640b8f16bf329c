"""Batches with their plans: each once, in order, on every rank alike, whatever comes in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import Batch, JaggedIds
from dlrm.pipeline import Pipeline, PlannedBatch
from dlrm.recorder import PhaseTimer
from embeddings import RowOptimizerConfig, ShardedEmbeddings
from tests.sharding_cases import Model, bounds_of_rank, build, draw_batches, part_of, plan_of
from tests.thread_ranks import ThreadRank, run_ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


# ---------------------------------------------------------------------- with embeddings that note


def make_batch(number: int, batch_size: int = 4, weight: float | None = None) -> Batch:
    """Its first row tells which one it is."""
    ids = JaggedIds(
        torch.full((batch_size,), number), torch.arange(batch_size + 1, dtype=torch.int64), 1
    )
    weight_B = None if weight is None else torch.full((batch_size,), weight)
    row_B = torch.arange(batch_size) + 100 * number
    return Batch(torch.zeros(batch_size, 1), ids, torch.zeros(batch_size), weight_B, row_B)


class Noting:
    """Stands for `ShardedEmbeddings`: notes which plan is begun, sent on and finished, and when.

    Args:
        world_size: what `comm` says.
    """

    def __init__(self, world_size: int = 2) -> None:
        self.comm = SimpleNamespace(world_size=world_size)
        self.host, self.splits_hot = None, False
        self.events: list[tuple[str, int]] = []
        self.weights: list[float | None] = []

    def stage(self, plans: Any) -> None:
        """Nothing is in host memory."""

    def begin_plan(
        self, ids: JaggedIds, *, weight_sum: float | None = None, first_sample: int = 0
    ) -> Any:
        number = int(ids.values_L[0]) if ids.values_L.numel() else -1
        self.weights.append(weight_sum)
        self.events.append(("counts", number))

        def finish() -> Any:
            self.events.append(("finish", number))
            return SimpleNamespace(global_batch_size=10 * ids.batch_size, number=number)

        return SimpleNamespace(send_ids=lambda: self.events.append(("ids", number)), finish=finish)


def make_pipeline(
    batches: Iterable[Batch],
    num_batches: int,
    noting: Noting,
    *,
    overlap: bool = True,
    accumulate: int = 1,
) -> Pipeline:
    embeddings: Any = noting
    return Pipeline(
        batches,
        num_batches,
        embeddings,
        accumulate=accumulate,
        overlap=overlap,
        timer=PhaseTimer(),
    )


def take_all(pipeline: Pipeline, noting: Noting) -> Iterator[PlannedBatch]:
    """As the trainer does: both calls within each step."""
    while (planned := pipeline.take()) is not None:
        noting.events.append(("step", number_of(planned)))
        pipeline.begin_next()
        pipeline.send_next_ids()
        yield planned


def number_of(planned: PlannedBatch) -> int:
    return int(planned.batch.row_B[0]) // 100


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("available", "wanted"), [(5, 5), (5, 9), (5, 3), (5, 1), (1, 4), (0, 3)])
def test_every_batch_comes_once(available: int, wanted: int, overlap: bool) -> None:
    """Up to `max_steps` or the end of the data; nothing beyond is read or planned."""
    read: list[int] = []

    def source() -> Iterator[Batch]:
        for number in range(available):
            read.append(number)
            yield make_batch(number)

    noting = Noting()
    pipeline = make_pipeline(source(), wanted, noting, overlap=overlap)
    numbers = [number_of(planned) for planned in take_all(pipeline, noting)]
    expected = list(range(min(available, wanted)))
    assert numbers == read == expected
    for event in ("counts", "ids", "finish"):
        assert [number for name, number in noting.events if name == event] == expected, event
    # The end stays the end.
    pipeline.begin_next()
    pipeline.send_next_ids()
    assert pipeline.take() is None
    assert read == expected


def test_the_next_plan_travels_during_a_step() -> None:
    noting = Noting()
    list(take_all(make_pipeline(map(make_batch, range(3)), 3, noting), noting))
    assert noting.events == [
        ("counts", 0), ("ids", 0), ("finish", 0), ("step", 0),
        ("counts", 1), ("ids", 1), ("finish", 1), ("step", 1),
        ("counts", 2), ("ids", 2), ("finish", 2), ("step", 2),
    ]  # fmt: skip
    noting = Noting()
    pipeline = make_pipeline(map(make_batch, range(2)), 2, noting)
    assert pipeline.take() is not None
    noting.events.clear()
    pipeline.begin_next()
    assert noting.events == [("counts", 1)]
    pipeline.send_next_ids()
    assert noting.events == [("counts", 1), ("ids", 1)]
    # Only now, when it is asked for, is anything waited for.
    assert pipeline.take() is not None
    assert noting.events == [("counts", 1), ("ids", 1), ("finish", 1)]


def test_without_overlap_a_batch_is_read_when_it_is_asked_for() -> None:
    noting = Noting()
    pipeline = make_pipeline(map(make_batch, range(2)), 2, noting, overlap=False)
    assert pipeline.take() is not None
    noting.events.clear()
    pipeline.begin_next()
    pipeline.send_next_ids()
    assert noting.events == []
    assert pipeline.take() is not None
    assert noting.events == [("counts", 1), ("ids", 1), ("finish", 1)]


def test_a_step_that_plans_nothing_ahead_loses_nothing() -> None:
    """`begin_next` may be left out, as after a change of the model by hand."""
    noting = Noting()
    pipeline = make_pipeline(map(make_batch, range(4)), 4, noting)
    numbers = []
    while (planned := pipeline.take()) is not None:
        numbers.append(number_of(planned))
        if len(numbers) % 2:
            pipeline.begin_next()
            pipeline.send_next_ids()
    assert numbers == [0, 1, 2, 3]


def test_an_error_of_the_reader_comes_where_the_batch_would() -> None:
    def source() -> Iterator[Batch]:
        yield make_batch(0)
        raise OSError("disk gone")

    pipeline = make_pipeline(source(), 5, Noting())
    assert pipeline.take() is not None
    with pytest.raises(OSError, match="disk gone"):
        pipeline.begin_next()
    pipeline = make_pipeline(source(), 5, Noting(), overlap=False)
    assert pipeline.take() is not None
    pipeline.begin_next()
    with pytest.raises(OSError, match="disk gone"):
        pipeline.take()


@pytest.mark.parametrize("batch_size", [0, 1, 2, 7])
@pytest.mark.parametrize("world_size", [1, 3])
def test_micro_batches(world_size: int, batch_size: int) -> None:
    """Together they are the batch, in its order. On ranks there are always as many, or one rank
    would wait for a collective that the others don't issue; one process needs no empty ones."""
    noting = Noting(world_size)
    batch = make_batch(1, batch_size, weight=0.5)
    planned = make_pipeline([batch], 1, noting, accumulate=3).take()
    assert planned is not None
    parts = [micro for micro, _ in planned.micro_batches]
    assert len(parts) == (3 if world_size > 1 else max(1, min(3, batch_size)))
    assert torch.equal(torch.cat([micro.row_B for micro in parts]), batch.row_B)
    assert max(micro.batch_size for micro in parts) - min(micro.batch_size for micro in parts) <= 1
    # Each plan is told the weight of the whole step: the loss is a mean over all of it.
    assert noting.weights == [0.5 * batch_size] * len(parts)
    assert planned.global_batch_size == 10 * batch_size
    assert planned.batch is batch


def test_without_example_weights_a_sample_weighs_1() -> None:
    noting = Noting()
    make_pipeline([make_batch(0, 5)], 1, noting, accumulate=2).take()
    assert noting.weights == [5.0, 5.0]


# ---------------------------------------------------------------------------- on ranks, for real

MODEL = Model(RowOptimizerConfig("adagrad"))


def batches_of(rank: int, world_size: int, num_batches: int) -> list[Batch]:
    """This rank's uneven shares of batches of many sizes, among them empty ones."""
    found = []
    for step, ids in enumerate(draw_batches(MODEL, "weighted", num_batches)):
        part = part_of(ids, *bounds_of_rank(ids.batch_size, step, rank, world_size))
        size = part.batch_size
        weight_B = torch.full((size,), 0.5)
        rows = torch.arange(size)
        found.append(Batch(torch.zeros(size, 1), part, torch.zeros(size), weight_B, rows))
    return found


def run_steps(
    comm: ThreadRank, num_batches: int, *, overlap: bool, evaluate_at: set[int], accumulate: int = 1
) -> tuple[list[tuple[int, float, Tensor]], list[str]]:
    """Looks up every batch as a step would; after some steps, other batches, as an evaluation."""
    embeddings: ShardedEmbeddings = build(comm, MODEL, plan_of("mixed", comm.world_size, "mixed"))
    batches = batches_of(comm.rank, comm.world_size, num_batches + 3)
    pipeline = Pipeline(
        batches,
        num_batches,
        embeddings,
        accumulate=accumulate,
        overlap=overlap,
        timer=PhaseTimer(),
    )
    found = []
    while (planned := pipeline.take()) is not None:
        pooled = []
        for position, (_, plan) in enumerate(planned.micro_batches):
            is_last = position == len(planned.micro_batches) - 1
            rows = embeddings.begin_lookup(plan)
            if is_last:
                pipeline.begin_next()
            pooled.append(rows.finish().detach().clone())
            if is_last:
                pipeline.send_next_ids()
        weight = planned.micro_batches[0][1].total_weight
        found.append((planned.global_batch_size, weight, torch.cat(pooled)))
        if len(found) in evaluate_at:
            for batch in batches[-5:]:
                embeddings.lookup(embeddings.plan_batch(batch.ids, training=False), training=False)
    return found, comm.kinds


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_evaluation_does_not_disturb_the_plan_under_way(accumulate: int) -> None:
    """Its ids lie in buffers of their own until the plan is finished; the ranks stay in step."""
    plain, plain_kinds = zip(
        *run_ranks(
            3,
            lambda comm: run_steps(
                comm, 8, overlap=False, evaluate_at=set(), accumulate=accumulate
            ),
        ),
        strict=True,
    )
    disturbed, kinds = zip(
        *run_ranks(
            3,
            lambda comm: run_steps(
                comm, 8, overlap=True, evaluate_at={1, 4, 5, 8}, accumulate=accumulate
            ),
        ),
        strict=True,
    )
    for kinds_of_ranks in (plain_kinds, kinds):
        assert kinds_of_ranks[0] == kinds_of_ranks[1] == kinds_of_ranks[2]
    assert len(kinds[0]) == len(plain_kinds[0]) + 4 * 5 * 3  # counts, ids, rows
    for rank, other in zip(plain, disturbed, strict=True):
        assert len(rank) == 8
        for (size, weight, pooled_BS), (other_size, other_weight, other_BS) in zip(
            rank, other, strict=True
        ):
            assert (size, weight) == (other_size, other_weight)
            assert weight == 0.5 * size
            assert torch.equal(pooled_BS, other_BS)


def test_ranks_stop_at_the_same_step() -> None:
    """With the plan of no further batch under way: nothing is left that another might wait for."""
    ranks = run_ranks(3, lambda comm: run_steps(comm, 4, overlap=True, evaluate_at={4}))
    for found, kinds in ranks:
        assert len(found) == 4
        assert kinds.count("counts") == kinds.count("ids") == kinds.count("rows") == 4 + 5
