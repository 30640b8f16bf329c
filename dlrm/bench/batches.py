"""The batches of a measurement, in memory before the clock starts: the loader isn't measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from data.batch import Batch, JaggedIds
from data.errors import UserError
from data.parquet import Order, PreparedDataset


def check_batches(dataset: PreparedDataset, part: str, *, batch_size: int, bag_size: int) -> None:
    """Refuses data that `memory_batches` can't make batches of.

    Raises:
        UserError: where the part has no full batch, or its bags can't be joined.
    """
    if dataset.num_rows(part) < batch_size:
        raise UserError(
            f"data.batch_size={batch_size}: the {part} part of the data has only "
            f"{dataset.num_rows(part):,} rows; lower it or choose other data"
        )
    if bag_size > 1 and any(f.is_list or f.bag_weights is not None for f in dataset.features):
        raise UserError(
            f"bench.bag_size={bag_size} joins bags of one id, but these data have others: set "
            "bench.bag_size=1"
        )


def memory_batches(
    dataset: PreparedDataset,
    part: str,
    *,
    batch_size: int,
    num_batches: int,
    bag_size: int,
    seed: int,
    rank: int,
    world_size: int,
) -> list[Batch]:
    """This rank's share of the first full global batches of a part, in shuffled order.

    Args:
        dataset: the prepared data; read again from its beginning, in another order, where it ends.
        part: `train` or `valid`.
        batch_size: samples of a global batch.
        num_batches: how many.
        bag_size: ids per bag. Above 1, a bag holds the id of its own sample and those of the
            samples at its place in the batches that follow: ids of the same distribution.
        seed: of the order.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        UserError: as `check_batches` does.
    """
    check_batches(dataset, part, batch_size=batch_size, bag_size=bag_size)

    def full_batches() -> Iterator[Batch]:
        epoch = 0
        while True:
            order = Order(
                batch_size, seed=seed, epoch=epoch, shuffle=True, rank=rank, world_size=world_size
            )
            yield from islice(dataset.batches(part, order), dataset.num_rows(part) // batch_size)
            epoch += 1

    source = full_batches()
    return [_join_bags(list(islice(source, bag_size))) for _ in range(num_batches)]


def _join_bags(batches: list[Batch]) -> Batch:
    """The first batch, each of its bags followed by those of the others at the same place."""
    first = batches[0]
    if len(batches) == 1:
        return first
    assert all(b.ids.is_one_hot and b.ids.weights_L is None for b in batches)
    values_L = torch.stack([b.ids.values_L for b in batches], dim=1).reshape(-1)
    offsets = torch.arange(0, values_L.numel() + 1, len(batches))
    ids = JaggedIds(values_L, offsets, first.ids.num_features)
    return Batch(first.dense_BN, ids, first.label_B, first.weight_B, first.row_B)
