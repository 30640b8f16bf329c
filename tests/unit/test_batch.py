"""`JaggedIds` and `Batch`: the layout, its checks, and cutting micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data.batch import Batch, JaggedIds

Bag = list[tuple[int, float]]


def jagged(bags_FB: list[list[Bag]], *, weighted: bool = False) -> JaggedIds:
    """From bags of (id, weight) by feature and sample."""
    flat = [bag for bags in bags_FB for bag in bags]
    offsets = [0]
    for bag in flat:
        offsets.append(offsets[-1] + len(bag))
    ids = [id for bag in flat for id, _ in bag]
    weights = torch.tensor([w for bag in flat for _, w in bag]) if weighted else None
    return JaggedIds(
        torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets), len(bags_FB), weights
    )


def bags_of(ids: JaggedIds) -> list[list[Bag]]:
    weights = torch.ones(ids.values_L.numel()) if ids.weights_L is None else ids.weights_L
    size = ids.batch_size
    return [
        [
            list(
                zip(
                    ids.values_L[begin:end].tolist(),
                    weights[begin:end].tolist(),
                    strict=True,
                )
            )
            for begin, end in zip(
                ids.offsets[f * size : (f + 1) * size].tolist(),
                ids.offsets[f * size + 1 : (f + 1) * size + 1].tolist(),
                strict=True,
            )
        ]
        for f in range(ids.num_features)
    ]


BAG = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.5, 1.0, 2.0])), max_size=3)


@st.composite
def bags_and_cut(draw: st.DrawFn) -> tuple[list[list[Bag]], int, int]:
    size = draw(st.integers(0, 5))
    features = draw(st.integers(1, 3))
    bags = st.lists(BAG, min_size=size, max_size=size)
    start = draw(st.integers(0, size))
    return (
        draw(st.lists(bags, min_size=features, max_size=features)),
        start,
        draw(st.integers(start, size)),
    )


def test_the_layout_is_the_one_drawn_in_the_module() -> None:
    ids = JaggedIds(
        torch.tensor([7, 2, 9, 4, 4, 1, 1, 3]), torch.tensor([0, 2, 2, 3, 4, 5, 8]), num_features=2
    )
    assert ids.batch_size == 3
    assert ids.lengths_FB().tolist() == [[2, 0, 1], [1, 1, 3]]
    assert [[[i for i, _ in bag] for bag in bags] for bags in bags_of(ids)] == [
        [[7, 2], [], [9]],
        [[4], [4], [1, 1, 3]],
    ]


@given(bags_and_cut())
def test_narrow_keeps_the_bags_of_its_samples(case: tuple[list[list[Bag]], int, int]) -> None:
    bags_FB, start, stop = case
    cut = jagged(bags_FB, weighted=True).narrow(start, stop)
    assert cut.batch_size == stop - start
    assert bags_of(cut) == [bags[start:stop] for bags in bags_FB]
    assert cut.lengths_FB().tolist() == [[len(bag) for bag in bags[start:stop]] for bags in bags_FB]


@pytest.mark.parametrize(
    ("offsets", "told"),
    [
        ([0, 3, 2, 5], "decrease at bag 1: 3 to 2"),
        ([0, 1, 3, 4], "from 0 to 4, but must run from 0 to the number of ids, 5"),
        ([1, 2, 3, 5], "from 1 to 5"),
        ([0, 2, 4, 6], "from 0 to 6"),
        ([-1, 0, 3, 5], "from -1"),
    ],
)
def test_bad_offsets_are_an_error_and_no_crash(offsets: list[int], told: str) -> None:
    """B13: offsets that don't match the ids once crashed the process."""
    with pytest.raises(ValueError, match=told):
        JaggedIds(torch.arange(5), torch.tensor(offsets), num_features=1)


LONG = torch.int64


@pytest.mark.parametrize(
    ("values", "offsets", "features", "told"),
    [
        (torch.zeros(2), torch.tensor([0, 2]), 1, "int64"),
        (torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2]), 1, "int64"),
        (torch.zeros(2, dtype=LONG), torch.tensor([0, 2], dtype=torch.int32), 1, "int64"),
        (torch.zeros(2, 1, dtype=LONG), torch.tensor([0, 2]), 1, "flat"),
        (torch.zeros(0, dtype=LONG), torch.zeros(0, dtype=LONG), 1, "at least one entry"),
        (torch.zeros(3, dtype=LONG), torch.tensor([0, 1, 2, 3]), 2, "3 bags can't be cut into 2"),
        (torch.zeros(1, dtype=LONG), torch.tensor([0, 1]), 0, "1 bags can't be cut into 0"),
    ],
)
def test_bad_parts_are_refused(values: Tensor, offsets: Tensor, features: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        JaggedIds(values, offsets, features)


def test_bag_weights_must_be_one_per_id() -> None:
    with pytest.raises(ValueError, match="1 bag weights for 2 ids"):
        JaggedIds(torch.zeros(2, dtype=LONG), torch.tensor([0, 2]), 1, torch.ones(1))


@pytest.mark.parametrize(
    ("bags_FB", "expected"),
    [
        ([[[(1, 1.0)], [(2, 1.0)]]], True),
        ([[[(1, 1.0), (2, 1.0)], []]], False),
        ([[[(1, 1.0)], []]], False),
        ([[], []], True),
    ],
)
def test_one_hot_means_exactly_one_id_in_every_bag(
    bags_FB: list[list[Bag]], expected: bool
) -> None:
    """Two ids and an empty bag have as many ids as bags, too."""
    assert jagged(bags_FB).is_one_hot is expected


def batch_of(size: int, ids: JaggedIds | None = None, **parts: Tensor | None) -> Batch:
    values: dict[str, Tensor | None] = {
        "dense_BN": torch.arange(size * 2.0).view(size, 2),
        "label_B": torch.arange(float(size)),
        "weight_B": torch.arange(float(size)) + 10,
        "row_B": torch.arange(size) * 7,
        **parts,
    }
    if ids is None:
        ids = jagged([[[(sample, 1.0)] * (sample % 3) for sample in range(size)]])
    return Batch(ids=ids, **values)  # type: ignore[arg-type]


@given(st.integers(0, 6), st.data())
def test_narrowing_a_batch_cuts_every_part_alike(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = batch_of(size)
    cut = whole.narrow(start, stop)
    assert cut.batch_size == stop - start
    assert whole.label_B is not None
    assert whole.weight_B is not None
    assert cut.label_B is not None
    assert cut.weight_B is not None
    assert cut.dense_BN.tolist() == whole.dense_BN[start:stop].tolist()
    assert cut.label_B.tolist() == whole.label_B[start:stop].tolist()
    assert cut.weight_B.tolist() == whole.weight_B[start:stop].tolist()
    assert cut.row_B.tolist() == whole.row_B[start:stop].tolist()
    assert bags_of(cut.ids) == [bags_of(whole.ids)[0][start:stop]]


def test_narrowing_a_batch_without_optional_parts() -> None:
    cut = batch_of(4, label_B=None, weight_B=None).narrow(1, 3)
    assert cut.label_B is None
    assert cut.weight_B is None


def test_a_batch_of_dense_features_only() -> None:
    """A model without tables can be trained in micro-batches too."""
    no_ids = JaggedIds(torch.zeros(0, dtype=LONG), torch.zeros(1, dtype=LONG), num_features=0)
    cut = batch_of(4, ids=no_ids).narrow(1, 3)
    assert cut.batch_size == 2
    assert cut.ids.batch_size == 2
    assert cut.ids.lengths_FB().shape == (0, 2)


def test_an_empty_batch() -> None:
    batch = batch_of(0, ids=jagged([[], []]))
    assert batch.batch_size == 0
    assert batch.ids.lengths_FB().shape == (2, 0)
    assert batch.narrow(0, 0).batch_size == 0


@pytest.mark.parametrize(
    "part",
    [
        {"label_B": torch.zeros(3)},
        {"weight_B": torch.zeros(5)},
        {"row_B": torch.zeros(3, dtype=LONG)},
        {"dense_BN": torch.zeros(3, 2)},
        {"ids": jagged([[[]]])},
    ],
)
def test_parts_of_different_size_are_refused(part: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="disagree on its size"):
        batch_of(4, **part)  # type: ignore[arg-type]


def test_moving_to_the_cpu_copies_nothing() -> None:
    batch = batch_of(2)
    assert batch.to(torch.device("cpu")) is batch


def test_moving_to_a_device_moves_what_the_step_needs() -> None:
    """The meta device stands for an accelerator; row numbers stay on the host."""
    ids = jagged([[[(1, 2.0)], []]], weighted=True)
    moved = batch_of(2, ids=ids).to(torch.device("meta"))
    assert moved.ids.weights_L is not None
    assert moved.label_B is not None
    assert moved.weight_B is not None
    parts = [moved.dense_BN, moved.label_B, moved.weight_B]
    for tensor in [*parts, moved.ids.values_L, moved.ids.offsets, moved.ids.weights_L]:
        assert tensor.device.type == "meta", "and no check waited for the device"
    assert moved.row_B.device.type == "cpu"
    assert ids.values_L.device.type == "cpu", "the batch itself stays"
