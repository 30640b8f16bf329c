"""The order of samples: a function of seed and epoch, the same rows for every number of ranks.

Row groups are made of 4 rows instead of 8,192 here, so that a part of 600 rows has several files
and every lane several groups to shuffle.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from data import lanes, parquet
from data.batch import Batch
from data.errors import UserError
from data.hashing import mix
from data.loader import Prefetcher
from data.parquet import Order, PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split

# Each example writes or reads files: shrinking a failure would take minutes.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
GROUP_ROWS = 4
SIZES = (1, 63, 64, 65, 250, 600)
WORLD_SIZES = (1, 2, 3, 64)
ReadPart = Callable[[Path, str], dict[str, list[Any]]]


@pytest.fixture(scope="module", autouse=True)
def small_groups() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "LANE_GROUP_ROWS", GROUP_ROWS)
        yield


def schema_of(split: Split | None = None, *, plain: bool = False) -> Schema:
    """`plain`: no example weights and no lists."""
    sparse = {
        "city": SparseColumn(token="int"),
        "tags": SparseColumn(
            "int", "identity", rows=50, separator="|", bag_weights="tag_weights", pooling="sum"
        ),
        "user": SparseColumn("int", "hash", rows=997),
        "seen": SparseColumn("int", "identity", rows=9, separator=" "),
    }
    if plain:
        del sparse["tags"], sparse["seen"]
    columns = ["label", "weight", "row", "noise", "city", "tags", "tag_weights", "user", "seen"]
    return Schema(
        format=RawFormat(columns=columns, delimiter=","),
        example_weight=None if plain else "weight",
        dense={"row": DenseColumn("identity"), "noise": DenseColumn("identity")},
        sparse=sparse,
        split=split or Split("in_order", 0, 0),
    )


def line(row: int) -> str:
    """One raw row: everything in it follows from its number."""
    tags = [(row + 3 * n) % 50 for n in range(row % 4)]
    weights = [row % 8 + n / 4 for n in range(row % 4)]
    fields = [
        row % 3 // 2,
        row % 5 / 2,
        row,
        row * 37 % 101,
        "" if row % 7 == 3 else row % 17,
        "|".join(map(str, tags)),
        "|".join(map(str, weights)),
        row * 11,
        " ".join(str(n) for n in range(row % 3)),
    ]
    return ",".join(map(str, fields)) + "\n"


def build(folder: Path, num_rows: int, schema: Schema) -> PreparedDataset:
    folder.mkdir(parents=True)
    raw = folder / "raw.csv"
    raw.write_text("".join(line(row) for row in range(num_rows)))
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, PreparedDataset]:
    root = tmp_path_factory.mktemp("order")
    return {size: build(root / str(size), size, schema_of()) for size in SIZES}


@pytest.fixture(scope="module")
def dataset(datasets: dict[int, PreparedDataset]) -> PreparedDataset:
    assert len(datasets[600].manifest.parts["train"].files) == 3
    return datasets[600]


def rows_of(dataset: PreparedDataset, part: str = "train", **order: Any) -> list[list[int]]:
    """The row numbers of each batch, in order."""
    return [batch.row_B.tolist() for batch in dataset.batches(part, Order(**order))]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


Sample = tuple[int, list[float], float, float | None, list[list[tuple[int, float]]]]


def samples_of(batch: Batch) -> list[Sample]:
    """Row, dense values, label, example weight and weighted bags of each sample."""
    assert batch.label_B is not None
    ids, size = batch.ids, batch.batch_size
    values, offsets = ids.values_L.tolist(), ids.offsets.tolist()
    weights = [1.0] * len(values) if ids.weights_L is None else ids.weights_L.tolist()
    bags = [
        list(zip(values[begin:end], weights[begin:end], strict=True))
        for begin, end in itertools.pairwise(offsets)
    ]
    return list(
        zip(
            batch.row_B.tolist(),
            batch.dense_BN.tolist(),
            batch.label_B.tolist(),
            [None] * size if batch.weight_B is None else batch.weight_B.tolist(),
            [bags[b::size] for b in range(size)],
            strict=True,
        )
    )


# ---- every row once, whatever the ranks


@given(
    size=st.sampled_from(SIZES),
    batch_share=st.floats(0.1, 1.2),
    world_size=st.sampled_from(WORLD_SIZES),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
)
@settings(max_examples=25, deadline=None, phases=NO_SHRINKING)
def test_every_row_once_and_the_same_batches_for_every_number_of_ranks(
    datasets: dict[int, PreparedDataset],
    size: int,
    batch_share: float,
    world_size: int,
    shuffle: bool,
    seed: int,
    epoch: int,
) -> None:
    dataset = datasets[size]
    order = {
        "global_batch_size": max(1, int(size * batch_share)),
        "shuffle": shuffle,
        "seed": seed,
        "epoch": epoch,
    }
    alone = rows_of(dataset, **order)
    assert sorted(flat(alone)) == list(range(size))
    assert len(alone) == dataset.num_batches("train", order["global_batch_size"])
    assert all(len(batch) == order["global_batch_size"] for batch in alone[:-1])
    shares = [rows_of(dataset, **order, rank=r, world_size=world_size) for r in range(world_size)]
    assert all(len(share) == len(alone) for share in shares), "all ranks take as many steps"
    joined = [[row for share in shares for row in share[t]] for t in range(len(alone))]
    assert joined == alone, "the ranks' shares, one after the other, are the batch of one rank"


@pytest.mark.parametrize(("batch_size", "world_size"), [(64, 2), (192, 2), (256, 64)])
def test_shares_are_even_where_the_batch_is_a_multiple_of_the_lanes(
    dataset: PreparedDataset, batch_size: int, world_size: int
) -> None:
    for rank in range(world_size):
        share = rows_of(dataset, global_batch_size=batch_size, rank=rank, world_size=world_size)
        assert {len(rows) for rows in share[:-1]} == {batch_size // world_size}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_everything_of_a_row_travels_with_it(
    dataset: PreparedDataset, read_part: ReadPart, world_size: int, shuffle: bool
) -> None:
    raw = read_part(dataset.root, "train")
    assert raw["row"] == list(range(600)), "the written part is in raw order"
    mixed = mix(np.arange(600, dtype=np.uint64) * np.uint64(11)).tolist()
    seen = 0
    for rank in range(world_size):
        order = Order(100, seed=3, shuffle=shuffle, rank=rank, world_size=world_size)
        for batch in dataset.batches("train", order):
            for row, dense, label, weight, bags in samples_of(batch):
                seen += 1
                assert dense == [row, row * 37 % 101]
                assert label == row % 3 // 2
                assert weight == row % 5 / 2
                tags = [((row + 3 * n) % 50, row % 8 + n / 4) for n in range(row % 4)]
                seen_ids = [(n, 1.0) for n in range(row % 3)]
                city, user = [(raw["city"][row], 1.0)], [(1 + mixed[row] % 996, 1.0)]
                assert bags == [city, tags, user, seen_ids]
    assert seen == 600


# ---- order


def test_unshuffled_batches_are_consecutive_raw_rows(dataset: PreparedDataset) -> None:
    for batch_size in (1, 7, 64, 100, 5000):
        batches = rows_of(dataset, global_batch_size=batch_size)
        starts = range(0, 600, batch_size)
        expected = [list(range(s, min(s + batch_size, 600))) for s in starts]
        assert [sorted(batch) for batch in batches] == expected


def test_the_order_depends_on_seed_and_epoch_only(dataset: PreparedDataset) -> None:
    order = {"global_batch_size": 100, "shuffle": True}
    one = rows_of(dataset, **order, seed=1, epoch=2)
    assert one == rows_of(PreparedDataset(dataset.root), **order, seed=1, epoch=2)
    assert flat(one) == flat(rows_of(dataset, global_batch_size=100, shuffle=True, seed=1, epoch=2))
    for other in ({"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}, {"seed": 1, "epoch": 0}):
        changed = rows_of(dataset, **order, **other)
        # Of two independent orders, batches of a sixth of the rows share about a sixth.
        common = len(set(one[0]) & set(changed[0]))
        assert common < 50, f"{other} gives the same rows"
    assert rows_of(dataset, global_batch_size=100, seed=1) == rows_of(
        dataset, global_batch_size=100, seed=2
    ), "without shuffling the seed means nothing"


def test_the_batch_size_cuts_one_order(dataset: PreparedDataset) -> None:
    """Batches of 128 hold the rows of two batches of 64 each."""
    small = rows_of(dataset, global_batch_size=64, shuffle=True)
    large = rows_of(dataset, global_batch_size=128, shuffle=True)
    pairs = [sorted(flat(small[2 * t : 2 * t + 2])) for t in range(len(large))]
    assert [sorted(batch) for batch in large] == pairs


@given(
    st.integers(0, 11), st.booleans(), st.sampled_from([(0, 1), (1, 2)]), st.sampled_from([64, 90])
)
@settings(max_examples=15, deadline=None)
def test_a_cursor_goes_on_exactly_where_it_stood(
    dataset: PreparedDataset, skip: int, shuffle: bool, place: tuple[int, int], batch_size: int
) -> None:
    rank, world_size = place
    order = {
        "global_batch_size": batch_size,
        "shuffle": shuffle,
        "seed": 5,
        "rank": rank,
        "world_size": world_size,
    }
    whole = [samples_of(batch) for batch in dataset.batches("train", Order(**order))]
    rest = dataset.batches("train", Order(**order, start_batch=skip))
    assert [samples_of(batch) for batch in rest] == whole[skip:]


def test_a_cursor_at_the_end_gives_nothing(dataset: PreparedDataset) -> None:
    assert rows_of(dataset, global_batch_size=100, start_batch=6) == []


def test_parts_are_read_apart(tmp_path: Path) -> None:
    dataset = build(tmp_path / "parts", 500, schema_of(Split("in_order", 0.4, 0.2)))
    for part, first, size in (("train", 0, 200), ("valid", 200, 200), ("test", 400, 100)):
        assert dataset.num_rows(part) == size
        rows = [
            (int(row), int(dense))
            for batch in dataset.batches(part, Order(64, shuffle=True))
            for row, dense in zip(batch.row_B, batch.dense_BN[:, 0], strict=True)
        ]
        assert sorted(rows) == [(n, first + n) for n in range(size)]


# ---- shares without rows, and datasets without some columns


def test_an_empty_share_has_the_same_parts_as_the_others(dataset: PreparedDataset) -> None:
    """Ranks that disagreed on having weights would disagree on what to exchange."""
    shares = [
        next(iter(dataset.batches("train", Order(10, rank=rank, world_size=64))))
        for rank in range(64)
    ]
    assert [share.batch_size for share in shares] == [1] * 10 + [0] * 54
    empty = shares[63]
    assert empty.dense_BN.shape == (0, 2)
    assert empty.ids.lengths_FB().shape == (4, 0)
    for share in shares:
        assert share.label_B is not None
        assert share.weight_B is not None
        assert share.ids.weights_L is not None
        assert share.dense_BN.dtype == empty.dense_BN.dtype
        assert share.weight_B.dtype == share.label_B.dtype == share.dense_BN.dtype


def test_a_part_without_rows(dataset: PreparedDataset) -> None:
    assert rows_of(dataset, "test", global_batch_size=8) == []
    assert dataset.num_batches("test", 8) == 0
    dataset.check("train")
    with pytest.raises(UserError, match=r"the test part is empty \(rows: train 600, valid 0"):
        dataset.check("test")


def test_without_weights_and_lists_batches_are_one_hot(tmp_path: Path) -> None:
    dataset = build(tmp_path / "plain", 100, schema_of(plain=True))
    for rank in (0, 63):
        for batch in dataset.batches("train", Order(40, shuffle=True, rank=rank, world_size=64)):
            assert batch.weight_B is None
            assert batch.ids.weights_L is None
            assert batch.ids.is_one_hot


@pytest.mark.parametrize("kept", ["dense", "sparse"])
def test_models_of_one_kind_of_feature(tmp_path: Path, kept: str) -> None:
    schema = schema_of(plain=True)
    if kept == "dense":
        schema.sparse = {}
    else:
        schema.dense = {}
    dataset = build(tmp_path / kept, 100, schema)
    batches = list(dataset.batches("train", Order(30, shuffle=True)))
    assert sorted(row for batch in batches for row in batch.row_B.tolist()) == list(range(100))
    assert batches[0].dense_BN.shape == (30, len(schema.dense))
    assert batches[0].ids.num_features == len(schema.sparse)


# ---- reading


def test_few_files_are_held_open(dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows_of(dataset, global_batch_size=100, shuffle=True)
    monkeypatch.setattr(parquet, "_OPEN_FILES", 1)
    assert rows_of(dataset, global_batch_size=100, shuffle=True) == before


def test_a_column_in_raw_order(datasets: dict[int, PreparedDataset]) -> None:
    for size, dataset in datasets.items():
        assert dataset.column("train", "row").tolist() == list(range(size))
    assert datasets[64].column("valid", "row").tolist() == []


def test_no_dataset_or_half_a_dataset_is_refused(dataset: PreparedDataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prepared dataset there"):
        PreparedDataset(tmp_path / "nothing")
    half = tmp_path / "half"
    shutil.copytree(dataset.root, half)
    (half / "manifest.json").unlink()
    with pytest.raises(UserError, match="no prepared dataset there"):
        PreparedDataset(half)


def test_leaving_an_epoch_early_leaves_no_thread(dataset: PreparedDataset) -> None:
    before = set(threading.enumerate())
    with Prefetcher(dataset.batches("train", Order(64, shuffle=True)), depth=2) as batches:
        next(batches)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)  # The reader's is told to end, and not waited for.
        assert not thread.is_alive()


# ---- quality of the shuffle


def test_batches_of_rows_in_time_order_are_mixed(tmp_path: Path) -> None:
    """A batch draws 64 row groups from anywhere in the part; rows within a group are shuffled.

    With rows in time order, the mean row of a batch then scatters about the middle as the mean of
    64 independent draws does: by 1/√12 of the part over √64, which is 3.6 % of it. Unshuffled, or
    shuffled within a short window, batch means run through the whole part.
    """
    num_rows, batch_size = 4096, 128
    dataset = build(tmp_path / "time", num_rows, schema_of(plain=True))
    epochs = [
        rows_of(dataset, global_batch_size=batch_size, shuffle=True, seed=11, epoch=epoch)
        for epoch in range(2)
    ]
    for batches in epochs:
        rows = np.array(batches) / num_rows
        means, expected = rows.mean(axis=1), 12**-0.5 / 64**0.5
        assert abs(means - 0.5).max() < 5 * expected
        assert 0.5 * expected < means.std() < 1.5 * expected
        assert (rows.std(axis=1) > 0.8 * 12**-0.5).all(), "each batch spans the part"
        drift = np.corrcoef(np.arange(len(means)), means)[0, 1]
        assert abs(drift) < 0.6, "no trend over the epoch"
    same_batch = len(set(epochs[0][0]) & set(epochs[1][0]))
    assert same_batch < 4 * batch_size * batch_size / num_rows, "epochs mix anew"


def test_rows_within_a_group_are_shuffled_anew(datasets: dict[int, PreparedDataset]) -> None:
    """In a part of one file every lane is one group, of which only the inner order can change."""
    orders = []
    for epoch in (0, 1):
        batches = rows_of(datasets[250], global_batch_size=64, shuffle=True, seed=4, epoch=epoch)
        by_lane: dict[int, list[int]] = {lane: [] for lane in range(64)}
        for row in flat(batches):
            by_lane[row % 64].append(row // 64)
        orders.append(by_lane)
    # Of 58 lanes of 4 rows and 6 of 3, 3.4 are expected to agree with any given order.
    for other in ({lane: sorted(rows) for lane, rows in orders[0].items()}, orders[1]):
        assert sum(orders[0][lane] == other[lane] for lane in range(64)) < 15
    neighbours = sum(orders[0][lane] == orders[0][lane + 1] for lane in range(57))
    assert neighbours < 15, "each lane has an order of its own"


def test_lanes_take_their_groups_in_orders_of_their_own(dataset: PreparedDataset) -> None:
    batches = rows_of(dataset, global_batch_size=64, shuffle=True, seed=4)
    first_files = Counter(row // (64 * GROUP_ROWS) for row in batches[0])
    assert len(first_files) == 3
    assert min(first_files.values()) > 8, "64 lanes choose among three files about evenly"
