"""The batches of a check: each kind is what its name says, and the shares are the whole."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.build import build_tables
from dlrm.check_batches import (
    MadeBatch,
    interleave,
    lookups_of_pass,
    make_batches,
    own_batches,
)
from tests.check_cases import check_task
from tests.commands import write_visits

RANKS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """70 rows: three batches of 24 an epoch, the last of 22."""
    return write_visits(tmp_path_factory.mktemp("visits"), 70)


def made(dataset: PreparedDataset, world_size: int) -> dict[str, MadeBatch]:
    task = check_task(dataset, world_size, "row_wise", "kv")
    tables, features = build_tables(task.config, dataset.manifest)
    batches = make_batches(dataset, task.config, task.plan, tables, features)
    return {batch.name: batch for batch in batches}


def test_f10_lookups_of_a_pass_are_foreseen(visits: PreparedDataset) -> None:
    """What memory the limits take is told from them beforehand: at least as many, not far more."""
    task = check_task(visits, 2, "row_wise", "kv", {"check": {"steps": 9}})
    tables, features = build_tables(task.config, visits.manifest)
    batches = [b.batch for b in made(visits, 2).values()]
    batches += islice(own_batches(visits, task.config), 9)
    counts = {table.name: 0 for table in tables}
    for batch in batches:
        for feature, lengths_B in zip(features, batch.ids.lengths_FB(), strict=True):
            counts[feature.table] += int(lengths_B.sum())
    foreseen = lookups_of_pass(task.config, visits.manifest, features)
    for name, count in counts.items():
        assert count <= foreseen[name] <= 4 * count, name


@pytest.mark.parametrize("world_size", RANKS)
def test_shares_are_the_whole_batch(world_size: int, visits: PreparedDataset) -> None:
    batches = made(visits, world_size)
    assert len(batches) >= 10
    for name, batch in batches.items():
        assert len(batch.cuts) == world_size + 1, name
        assert (batch.cuts[0], batch.cuts[-1]) == (0, batch.batch.batch_size), name
        assert list(batch.cuts) == sorted(batch.cuts), name
        parts = [batch.of_rank(rank) for rank in range(world_size)]
        rows = torch.cat([part.row_B for part in parts])
        assert torch.equal(rows, batch.batch.row_B), name
        assert sum(p.ids.values_L.numel() for p in parts) == batch.batch.ids.values_L.numel(), name


@pytest.mark.parametrize("world_size", RANKS)
def test_every_id_is_a_row(world_size: int, visits: PreparedDataset) -> None:
    task = check_task(visits, world_size, "row_wise", "kv")
    tables, features = build_tables(task.config, visits.manifest)
    rows = {table.name: table.rows for table in tables}
    for batch in made(visits, world_size).values():
        ids = batch.batch.ids
        for index, feature in enumerate(features):
            start, stop = ids.offsets[[index * ids.batch_size, (index + 1) * ids.batch_size]]
            values = ids.values_L[start:stop]
            assert bool(((values >= 0) & (values < rows[feature.table])).all()), batch.name


def test_kinds_are_what_they_say(visits: PreparedDataset) -> None:
    batches = made(visits, 3)

    def sizes(name: str) -> list[int]:
        return [batches[name].of_rank(rank).batch_size for rank in range(3)]

    lengths = batches["ragged bags"].batch.ids.lengths_FB()
    assert lengths.min() == 0
    assert lengths.max() == 5
    first, second, third = sizes("uneven shares")
    assert first < second < third
    assert sizes("all on the last rank")[:2] == [0, 0]
    assert sizes("first rank empty")[0] == 0
    assert min(sizes("first rank empty")[1:]) > 0
    assert sum(sizes("one sample")) == 1
    assert sum(sizes("fewer samples than ranks")) == 2
    assert batches["no ids"].batch.ids.values_L.numel() == 0
    assert batches["no ids"].batch.batch_size > 0
    assert int(batches["a feature empty"].batch.ids.lengths_FB()[0].sum()) == 0
    assert int(batches["a feature empty"].batch.ids.lengths_FB().sum()) > 0
    weights = batches["weighted bags"].batch.ids.weights_L
    assert weights is not None
    assert bool((weights == 0).any())
    assert bool((weights < 0).any())
    # A rank without bag weights beside ranks that have some.
    assert batches["weighted bags"].of_rank(0).ids.weights_L is None
    assert batches["weighted bags"].of_rank(1).ids.weights_L is not None
    totals = [float(batches["weighted samples"].of_rank(r).weight_B.sum()) for r in range(3)]  # type: ignore[union-attr]
    assert totals[0] == 0
    assert min(totals[1:]) > 0


def test_one_id_is_looked_up_by_every_rank(visits: PreparedDataset) -> None:
    """So that the sum over ranks of its gradients is a sum over all of them."""
    batch = made(visits, 3)["one id everywhere"]
    for feature in range(batch.batch.ids.num_features):
        common: set[int] = set(range(1000))
        for rank in range(3):
            ids = batch.of_rank(rank).ids
            start, stop = (int(ids.offsets[f * ids.batch_size]) for f in (feature, feature + 1))
            counts = torch.bincount(ids.values_L[start:stop])
            common &= set(torch.nonzero(counts >= 3 * ids.batch_size)[:, 0].tolist())
        assert len(common) == 1


def test_both_sides_of_every_border_are_looked_up(visits: PreparedDataset) -> None:
    task = check_task(visits, 3, "row_wise", "kv")
    tables, features = build_tables(task.config, visits.manifest)
    ids = made(visits, 3)["rows at borders"].batch.ids
    found: dict[str, set[int]] = {table.name: set() for table in tables}
    for index, feature in enumerate(features):
        start, stop = ids.offsets[[index * ids.batch_size, (index + 1) * ids.batch_size]]
        found[feature.table] |= set(ids.values_L[start:stop].tolist())
    for shard in task.plan.shards:
        assert {shard.row_start, shard.row_stop - 1} <= found[shard.table], shard


def test_made_batches_are_the_same_every_time(visits: PreparedDataset) -> None:
    first, second = made(visits, 2), made(visits, 2)
    for name, batch in first.items():
        assert torch.equal(batch.batch.ids.values_L, second[name].batch.ids.values_L)
        assert torch.equal(batch.batch.row_B, second[name].batch.row_B)


@pytest.mark.parametrize("num_own", [1, 2, 7, 12, 50])
def test_every_made_batch_comes_once_among_the_own(num_own: int, visits: PreparedDataset) -> None:
    batches = list(made(visits, 2).values())
    order = interleave(num_own, batches)
    assert order.count(None) == num_own
    assert [entry for entry in order if entry is not None] == batches
    assert order[0] is None


@pytest.mark.parametrize("world_size", RANKS)
def test_own_shares_are_those_of_training_epoch_after_epoch(
    world_size: int, visits: PreparedDataset
) -> None:
    """Eight batches: two epochs and two more, in another order each."""
    config = check_task(visits, 1, "row_wise", "kv").config

    def batches(rank: int, ranks: int) -> list[Batch]:
        return list(islice(own_batches(visits, config, rank, ranks), 8))

    whole = batches(0, 1)
    shares = [batches(rank, world_size) for rank in range(world_size)]
    assert [batch.batch_size for batch in whole[:6]] == [24, 24, 22] * 2
    for step, batch in enumerate(whole):
        rows = torch.cat([share[step].row_B for share in shares])
        assert torch.equal(rows, batch.row_B), step
    assert not torch.equal(whole[0].row_B, whole[3].row_B)
    assert sorted(torch.cat([b.row_B for b in whole[:3]]).tolist()) == list(range(70))


def test_all_files_are_closed(visits: PreparedDataset, tmp_path: Path) -> None:
    """A reader that is left in the middle ends its thread with it."""
    config = check_task(visits, 1, "row_wise", "kv").config
    reader = own_batches(visits, config)
    next(reader)
    reader.close()
    assert next(reader, None) is None
