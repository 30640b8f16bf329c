"""A new run from another's model: what is taken row by row, what starts anew, what is refused.

The data have every kind of vocabulary. The second dataset's tokens come in another order of
frequency, so that each stands on another row than it did.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from data.errors import UserError
from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from dlrm import checkpoint_rows
from dlrm.checkpoint import CheckpointInfo, Checkpoints
from dlrm.config import TrainConfig, WarmStartConfig
from dlrm.resume import with_restarts
from dlrm.trainer import Trainer
from dlrm.warm_start import WarmStarted, check_warm_start, find_warm_start, warm_start
from tests.commands import (
    TINY_MODEL,
    arrays_of,
    dense_values,
    dlrm,
    eval_lines,
    latest,
    read_result,
    train_lines,
    without_plots,
    write_adult_csv,
)
from tests.trainer_ranks import Ranks, assert_equal_bits, make_config, read_tables, rules

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

OLD_WORDS = [f"word {n}" for n in range(24)]
NEW_WORDS = [f"word {n}" for n in (*range(40, 8, -1),)]  # 9 … 23 stay, 24 … 40 are new.
FEATURES = {
    "many": SparseColumn(separator="|", missing="empty"),
    "words": SparseColumn(),
    "page": SparseColumn(
        token="int", vocabulary="identity", rows=9, out_of_range="last_row", missing="empty"
    ),
    "device": SparseColumn(token="int", vocabulary="hash", rows=11),
}


def write_shop(
    folder: Path,
    words: list[str],
    *,
    seed: int,
    features: dict[str, SparseColumn] | None = None,
    dense: tuple[str, ...] = ("x", "y"),
) -> PreparedDataset:
    """150 rows; `words` by falling frequency. Every feature of `features` is a column."""
    features = features or FEATURES
    rng = np.random.default_rng(seed)
    share = 1.0 / (np.arange(len(words)) + 2.0)
    lines = []
    for _ in range(150):
        fields = [str(rng.integers(0, 2)), *(f"{rng.normal():.4f}" for _ in dense)]
        for name in features:
            some = rng.choice(words, size=3, p=share / share.sum())
            kinds = {"many": "|".join(some[: rng.integers(0, 4)]), "page": str(rng.integers(0, 14))}
            kinds |= {"device": str(rng.integers(0, 99))}
            is_missing = name == "words" and rng.random() < 0.1
            fields.append("" if is_missing else kinds.get(name, str(some[0])))
        lines.append("\t".join(fields))
    folder.mkdir(parents=True)
    raw = folder / "shop.tsv"
    raw.write_text("\n".join(lines) + "\n")
    schema = Schema(
        name="shop",
        format=RawFormat(columns=["label", *dense, *features]),
        dense={name: DenseColumn("identity") for name in dense},
        sparse=features,
        split=Split(kind="in_order", valid=0.0, test=0.0),
    )
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


@dataclass
class Old:
    """A trained run and its data."""

    dataset: PreparedDataset
    info: CheckpointInfo
    arrays: dict[str, Tensor]


def train_old(dataset: PreparedDataset, folder: Path, rule: str, **more: Any) -> Old:
    """Two epochs on two ranks, tables cut anyhow."""
    overrides = {"optim": rules(rule, "sgd" if rule == "sgd" else "adagrad"), **more}
    overrides["train"] = {"epochs": 2, **more.get("train", {})}
    ranks = Ranks(dataset, folder, 2, "mixed", overrides)
    ranks.run(lambda trainer: trainer.fit())
    info = Checkpoints(folder).find("latest")
    arrays = {name: torch.from_numpy(values) for name, values in arrays_of(info.folder).items()}
    return Old(dataset, info, arrays)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_shop(tmp_path_factory.mktemp("old") / "data", OLD_WORDS, seed=1)


@pytest.fixture(scope="module")
def old_of(data: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Old]:
    """The old run by its row optimizer, once per module."""
    known: dict[str, Old] = {}

    def of(rule: str) -> Old:
        if rule not in known:
            known[rule] = train_old(data, tmp_path_factory.mktemp("old") / "run", rule)
        return known[rule]

    return of


@pytest.fixture(scope="module")
def old(old_of: Callable[[str], Old]) -> Old:
    return old_of("adagrad")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """Other words, more pages; the hashed table as it was."""
    features = FEATURES | {"page": replace(FEATURES["page"], rows=13)}
    return write_shop(tmp_path_factory.mktemp("new") / "data", NEW_WORDS, seed=2, features=features)


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """A feature more and one less: `tag` for `device`; the same words."""
    features = {name: column for name, column in FEATURES.items() if name != "device"}
    features["tag"] = SparseColumn()
    return write_shop(
        tmp_path_factory.mktemp("wider") / "data", OLD_WORDS, seed=1, features=features
    )


@dataclass
class Started:
    """What a new run holds right after its warm start, on rank 0, and what it would without."""

    outcome: WarmStarted
    tables: dict[str, Tensor]
    dense: dict[str, Tensor]
    digest: str
    num_row_steps: int
    fresh_tables: dict[str, Tensor]
    fresh_dense: dict[str, Tensor]


def start(
    info: CheckpointInfo,
    dataset: PreparedDataset,
    folder: Path,
    *,
    world_size: int = 1,
    layout: str = "table_wise",
    rule: str = "adagrad",
    overrides: dict[str, Any] | None = None,
    **keys: Any,
) -> Started:
    """`keys`: of `train.warm_start`."""
    wanted = {"warm_start": {"path": str(info.folder), **keys}}
    merged: dict[str, Any] = {"optim": rules(rule, "sgd"), **(overrides or {})}
    merged["train"] = {**wanted, **(overrides or {}).get("train", {})}
    ranks = Ranks(dataset, folder, world_size, layout, merged)

    def work(trainer: Trainer) -> Started:
        fresh_tables, fresh_dense = read_tables(trainer), dense_values(trainer)
        outcome = warm_start(
            info, trainer.config, trainer.dataset, trainer.model, trainer.embeddings
        )
        assert trainer.steps_done == 0
        return Started(
            outcome,
            read_tables(trainer),
            dense_values(trainer),
            trainer.digest(),
            trainer.embeddings.store.num_steps,
            fresh_tables,
            fresh_dense,
        )

    of_ranks = ranks.run(work)
    for other in of_ranks[1:]:
        assert (other.outcome, other.digest) == (of_ranks[0].outcome, of_ranks[0].digest)
        assert other.num_row_steps == of_ranks[0].num_row_steps
        assert_equal_bits(other.dense, of_ranks[0].dense)
    return of_ranks[0]


def refusal(
    info: CheckpointInfo,
    dataset: PreparedDataset,
    overrides: dict[str, Any] | None = None,
    **keys: Any,
) -> str:
    """The message of `check_warm_start`, that of the ranks as well."""
    merged: dict[str, Any] = {"optim": rules("adagrad", "sgd"), **(overrides or {})}
    merged["train"] = {"warm_start": {"path": str(info.folder), **keys}}
    with pytest.raises(UserError) as caught:
        check_warm_start(info, make_config(merged), dataset)
    return str(caught.value)


def rows_of_tokens(dataset: PreparedDataset, table: str, missing: int | None) -> dict[str, int]:
    """From the dictionary's parquet file, with the rows that stand for no token."""
    stored = pq.read_table(dataset.root / "vocabulary" / f"{table}.parquet")
    rows = dict(zip(stored["token"].to_pylist(), stored["row"].to_pylist(), strict=True))
    return rows | {"<unknown>": 0} | ({} if missing is None else {"<missing>": missing})


def rows_of(dataset: PreparedDataset, table: str) -> dict[str, int]:
    """What each row of a table stands for, by the rules of docs/formats.md."""
    num_rows = dataset.manifest.table_rows[table]
    if table == "page":
        return {str(n): n for n in range(num_rows - 1)} | {"<outside>": num_rows - 1}
    if table == "device":
        return {str(n): n for n in range(num_rows)}
    return rows_of_tokens(dataset, table, 1 if table in ("words", "tag") else None)


def expected_rows(
    old: Old, dataset: PreparedDataset, fresh: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Row by row: the vector that the token had, or the row's start value."""
    expected = {name: values.clone() for name, values in fresh.items()}
    for name, values in expected.items():
        before, now = rows_of(old.dataset, name.split(".")[0]), rows_of(dataset, name.split(".")[0])
        for token, row in now.items():
            if token in before:
                values[row] = old.arrays[name][before[token]]
    return expected


# --------------------------------------------------------------------------------- what is taken


@pytest.mark.parametrize(
    ("world_size", "layout", "rule", "piece_bytes"),
    [
        (1, "table_wise", "adagrad", None),
        (1, "table_wise", "rowwise_adagrad", 100),
        (2, "row_wise", "adagrad", 200),
        (2, "column_wise", "rowwise_adagrad", 100),
        (2, "replicated", "sgd", 60),
        (3, "mixed", "adam", 150),
        (4, "lone", "adagrad", 100),
    ],
)
def test_each_token_takes_its_vector_and_state_to_its_new_row(
    world_size: int,
    layout: str,
    rule: str,
    piece_bytes: int | None,
    old_of: Callable[[str], Old],
    grown: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a dictionary token → vector, on any ranks, in stretches of one row or of many."""
    old = old_of(rule)
    if piece_bytes is not None:
        monkeypatch.setattr(checkpoint_rows, "PIECE_BYTES", piece_bytes)
    place = {"world_size": world_size, "layout": layout, "rule": rule}
    found = start(old.info, grown, tmp_path / "run", grow=True, **place)  # type: ignore[arg-type]
    expected = expected_rows(old, grown, found.fresh_tables)
    assert_equal_bits(found.tables, expected)
    assert_equal_bits(found.dense, {n: old.arrays[f"dense/{n}"] for n in found.dense})
    # The test says something: words moved, some are new, some gone, and all that was trained.
    for table in ("many", "words"):
        before, now = rows_of(old.dataset, table), rows_of(grown, table)
        shared = before.keys() & now.keys() - {"<unknown>", "<missing>"}
        assert sum(before[token] != now[token] for token in shared) > 5
        special = len(now) - len([t for t in now if not t.startswith("<")])
        counts = found.outcome.tables[table]
        assert counts.kept == len(before.keys() & now.keys()) >= len(shared) + special
        assert counts.new == len(now) - counts.kept > 5
        assert counts.dropped == len(before) - counts.kept > 5
        assert not torch.equal(
            found.tables[f"{table}.weight"], found.fresh_tables[f"{table}.weight"]
        )
    page, device = found.outcome.tables["page"], found.outcome.tables["device"]
    assert (page.kept, page.new, page.dropped) == (9, 4, 0)
    assert (device.kept, device.new, device.dropped) == (11, 0, 0)
    assert found.outcome.state == rule
    steps = old.info.values["num_row_steps"]
    assert found.num_row_steps == steps == 30, "moments of Adam go with the count of their steps"


@pytest.mark.parametrize(
    ("world_size", "layout", "rule"),
    [(1, "table_wise", "adam"), (2, "row_wise", "adagrad"), (2, "column_wise", "adagrad")],
)
def test_on_the_same_data_the_model_is_the_same(
    world_size: int,
    layout: str,
    rule: str,
    old_of: Callable[[str], Old],
    tmp_path: Path,
) -> None:
    """Without the old dataset: equal digests need no dictionaries."""
    old = old_of(rule)
    place = {"world_size": world_size, "layout": layout, "rule": rule}
    found = start(old.info, old.dataset, tmp_path / "run", **place)  # type: ignore[arg-type]
    expected = {name: old.arrays[name] for name in found.tables}
    assert_equal_bits(found.tables, expected)
    assert all(counts.is_whole for counts in found.outcome.tables.values())
    assert found.outcome.dense_loaded == list(found.dense)
    assert found.outcome.dense_new == found.outcome.dense_dropped == []


def test_by_index_row_n_is_row_n(
    old: Old, grown: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_rows, "PIECE_BYTES", 100)
    for world_size, layout in ((1, "table_wise"), (2, "row_wise"), (2, "column_wise")):
        found = start(
            old.info,
            grown,
            tmp_path / f"{world_size}-{layout}",
            world_size=world_size,
            layout=layout,
            rows="index",
            grow=True,
        )
        for name, fresh in found.fresh_tables.items():
            stored = old.arrays[name]
            shared = min(len(stored), len(fresh))
            assert torch.equal(found.tables[name][:shared], stored[:shared]), name
            assert torch.equal(found.tables[name][shared:], fresh[shared:]), name
        assert found.outcome.rows == "index"
        counts = found.outcome.tables["many"]
        assert counts.kept == len(old.arrays["many.weight"]), "by index none is dropped"
        assert (counts.new > 0, counts.dropped) == (True, 0)


def test_a_table_that_shrinks_by_index_drops_its_last_rows(old: Old, tmp_path: Path) -> None:
    few = write_shop(tmp_path / "data", OLD_WORDS[:6], seed=4)
    found = start(old.info, few, tmp_path / "run", rows="index", grow=True)
    rows = few.manifest.table_rows["words"]
    assert torch.equal(found.tables["words.weight"], old.arrays["words.weight"][:rows])
    assert found.outcome.tables["words"].dropped == len(old.arrays["words.weight"]) - rows > 0


def test_features_that_came_and_went(old: Old, wider: PreparedDataset, tmp_path: Path) -> None:
    """Permitted by name; the dense weights that still fit are taken and the others named."""
    keys = {"new_tables": ["tag"], "dropped_tables": ["device"], "dense": "matching"}
    found = start(old.info, wider, tmp_path / "run", **keys)
    assert (found.outcome.new_tables, found.outcome.dropped_tables) == (["tag"], ["device"])
    kept = {n: v for n, v in found.fresh_tables.items() if not n.startswith("tag.")}
    expected = expected_rows(old, wider, kept)
    assert_equal_bits({n: found.tables[n] for n in kept}, expected)
    for name in ("tag.weight", "tag.sum"):
        assert torch.equal(found.tables[name], found.fresh_tables[name])
    note = "the dense network's sparse features differ: tag added, device removed"
    assert note in found.outcome.notes, "as many columns, which mean others"


def test_dense_weights_of_other_shapes_start_anew(old: Old, tmp_path: Path) -> None:
    """`matching`: those of equal name and shape; `none`: none."""
    narrow = {"model": {"top_mlp": [7]}}
    found = start(old.info, old.dataset, tmp_path / "a", overrides=narrow, dense="matching")
    anew = ["top.0.weight", "top.0.bias", "head.weight"]
    loaded = [name for name in found.dense if name not in anew]
    assert sorted(found.outcome.dense_new) == sorted(anew)
    assert sorted(found.outcome.dense_dropped) == sorted(anew)
    assert found.outcome.dense_loaded == loaded
    for name, values in found.dense.items():
        expected = old.arrays[f"dense/{name}"] if name in loaded else found.fresh_dense[name]
        assert torch.equal(values, expected), name
    found = start(old.info, old.dataset, tmp_path / "b", overrides=narrow, dense="none")
    assert_equal_bits(found.dense, found.fresh_dense)
    assert found.outcome.dense_loaded == []


def test_without_state_it_starts_anew_under_any_optimizer(old: Old, tmp_path: Path) -> None:
    found = start(old.info, old.dataset, tmp_path / "run", rule="adam", state=False)
    assert (found.outcome.state, found.num_row_steps) == (None, 0)
    for name, values in found.tables.items():
        is_weight = name.endswith(".weight")
        assert torch.equal(values, old.arrays[name] if is_weight else found.fresh_tables[name])


def test_a_table_named_in_both_lists_starts_anew(old: Old, tmp_path: Path) -> None:
    """Whatever differs: here its dim."""
    keys = {"new_tables": ["words"], "dropped_tables": ["words"], "dense": "none"}
    other = {"model": {"table_dims": {"many": 6, "words": 5}}}
    found = start(old.info, old.dataset, tmp_path / "run", overrides=other, **keys)
    assert (found.outcome.new_tables, found.outcome.dropped_tables) == (["words"], ["words"])
    assert torch.equal(found.tables["words.weight"], found.fresh_tables["words.weight"])
    assert torch.equal(found.tables["many.weight"], old.arrays["many.weight"])


def test_another_precision_converts(old: Old, tmp_path: Path) -> None:
    wide = {"train": {"precision": "fp64"}}
    found = start(old.info, old.dataset, tmp_path / "run", overrides=wide)
    assert torch.equal(found.tables["many.weight"], old.arrays["many.weight"].double())
    assert found.dense["head.bias"].dtype == torch.float64
    assert torch.equal(found.dense["head.bias"], old.arrays["dense/head.bias"].double())
    note = "stored float32, here float64 (train.precision): rows are converted"
    assert found.outcome.notes == [note]


def test_an_identity_table_without_a_row_for_others_keeps_its_ids(old: Old, tmp_path: Path) -> None:
    """The old last row stood for ids outside: it is no page, and has no place any more."""
    drops = replace(FEATURES["page"], rows=12, out_of_range="drop")
    dataset = write_shop(tmp_path / "data", OLD_WORDS, seed=1, features=FEATURES | {"page": drops})
    found = start(old.info, dataset, tmp_path / "run", grow=True)
    page = found.tables["page.weight"]
    assert torch.equal(page[:8], old.arrays["page.weight"][:8])
    assert torch.equal(page[8:], found.fresh_tables["page.weight"][8:])
    counts = found.outcome.tables["page"]
    assert (counts.kept, counts.new, counts.dropped) == (8, 4, 1)


def test_a_dense_feature_that_is_transformed_otherwise_is_named(
    old: Old, grown: PreparedDataset
) -> None:
    # Equal names and shapes, and yet other inputs: its first layer's weights mean something else.
    values = {**old.info.values, "dense_transforms": {"x": "identity", "y": "log1p"}}
    message = refusal(replace(old.info, values=values), grown, grow=True)
    assert "dense feature y: stored transform log1p, wanted identity" in message
    assert "feature x" not in message


def test_a_run_that_is_resumed_still_says_how_it_began(
    old: Old, grown: PreparedDataset, tmp_path: Path
) -> None:
    overrides: dict[str, Any] = {"optim": rules("adagrad", "sgd")}
    overrides["train"] = {"max_steps": 2}
    began = {"from": "another run"}

    def first(trainer: Trainer) -> None:
        trainer.warm_started = began
        trainer.fit()

    found: list[Any] = []
    Ranks(grown, tmp_path / "run", 1, "table_wise", overrides).run(first)
    again = Ranks(grown, tmp_path / "run", 1, "table_wise", overrides, resume="latest")
    again.run(lambda trainer: found.append(trainer.warm_started))
    assert found == [began]


def test_the_run_begins_at_step_0(old: Old, grown: PreparedDataset, tmp_path: Path) -> None:
    """Its schedule, epoch and samples are its own: every sample of the first epoch is seen."""
    overrides = {"optim": rules("adagrad", "sgd", schedule={"warmup_steps": 4})}
    overrides["train"] = {"log_every": 1, "warm_start": {"path": "x", "grow": True}}
    ranks = Ranks(grown, tmp_path / "run", 2, "row_wise", overrides)

    def work(trainer: Trainer) -> None:
        warm_start(old.info, trainer.config, grown, trainer.model, trainer.embeddings)
        trainer.fit()

    ranks.run(work)
    lines = train_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 16))
    rates = [line["lr_sparse"] for line in lines[:5]]
    assert rates == [*sorted(set(rates[:4])), rates[3]], "the warm-up of the schedule is seen"


# ------------------------------------------------------------------------------- what is refused


def test_what_differs_is_listed_with_what_permits_it(
    old: Old, wider: PreparedDataset, grown: PreparedDataset
) -> None:
    message = refusal(old.info, wider)
    assert f"{old.info.folder} doesn't fit this run" in message
    assert "table tag: not in the checkpoint; permit it with train.warm_start.new_tables=[tag]" in (
        message
    )
    assert (
        "table device: not in the data; permit it with train.warm_start.dropped_tables=[device]"
    ) in message
    assert "the dense network's sparse features differ: tag added, device removed" in message
    assert "train.warm_start.dense=matching" in message
    message = refusal(old.info, grown)
    rows, stored = grown.manifest.table_rows, old.info.tables
    for table in ("many", "words", "page"):
        assert (
            f"table {table}: {rows[table]} rows, stored {stored[table].rows}; permit it with "
            "train.warm_start.grow=true"
        ) in message
    assert "device" not in message
    assert "dense" not in message


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"new_tables": ["nope"]}, "new_tables=[nope]: the data has no such table"),
        ({"dropped_tables": ["nope"]}, "dropped_tables=[nope]: the checkpoint has no such table"),
        (
            {"new_tables": ["many"]},
            "table many: both the checkpoint and the data have it, so take ",
        ),
    ],
)
def test_lists_that_name_other_tables(keys: dict[str, Any], said: str, old: Old) -> None:
    assert said in refusal(old.info, old.dataset, **keys)


def test_other_dims_shapes_and_optimizers(old: Old) -> None:
    other = {
        "model": {"table_dims": {"many": 5, "words": 3}, "top_mlp": [7]},
        "optim": rules("adam", "sgd"),
    }
    message = refusal(old.info, old.dataset, other)
    assert "table many: dim 5, stored 6; set model.table_dims.many=6, or start it anew" in message
    assert "dense weight top.0.bias: 7, stored 5" in message
    assert "optim.sparse.name=adam, stored adagrad: " in message
    assert "train.warm_start.state=false starts it anew" in message
    assert "head.bias" not in message


def test_features_in_another_order_are_no_match(old: Old, tmp_path: Path) -> None:
    """Every shape is the same, and every column of the first top layer means another feature."""
    features = dict(reversed(FEATURES.items()))
    dataset = write_shop(tmp_path / "data", OLD_WORDS, seed=1, features=features)
    message = refusal(old.info, dataset, grow=True)
    assert "the dense network's sparse features differ: another order" in message
    dataset = write_shop(tmp_path / "b", OLD_WORDS, seed=1, dense=("x", "z"))
    message = refusal(old.info, dataset, grow=True)
    assert "the dense network's dense features differ: z added, y removed" in message


def test_tokens_that_cannot_be_compared(old: Old, tmp_path: Path) -> None:
    """Hash tables of other sizes, other vocabularies: not by number unless that is asked for."""
    features = FEATURES | {
        "device": replace(FEATURES["device"], rows=22),
        "words": SparseColumn(vocabulary="hash", rows=26),
    }
    dataset = write_shop(tmp_path / "data", OLD_WORDS, seed=1, features=features)
    message = refusal(old.info, dataset, grow=True)
    assert (
        "table device: hash table of 22 rows, stored 11: every id falls on another row" in message
    )
    assert "keep data.schema.sparse.device.rows=11, start it anew, in both" in message
    assert "table words: vocabulary is hash, stored dictionary, so tokens can't be" in message
    assert "or take row n for row n with train.warm_start.rows=index" in message
    found = start(old.info, dataset, tmp_path / "run", rows="index", grow=True)
    assert torch.equal(found.tables["device.weight"][:11], old.arrays["device.weight"])
    # As many rows, but ids begin at row 0, not behind one for missing values.
    features = FEATURES | {"device": replace(FEATURES["device"], missing="empty")}
    dataset = write_shop(tmp_path / "empty", OLD_WORDS, seed=1, features=features)
    assert "table device: missing is empty, stored row, so " in refusal(old.info, dataset)


def test_the_other_dataset_is_found_where_it_is_said_to_be(
    grown: PreparedDataset, tmp_path: Path
) -> None:
    """Moved, another one, without a dictionary, with a damaged one."""
    dataset = write_shop(tmp_path / "data", OLD_WORDS, seed=1)
    old = train_old(dataset, tmp_path / "old", "adagrad")
    moved = tmp_path / "moved"
    shutil.move(dataset.root, moved)
    message = refusal(old.info, grown, grow=True)
    assert "needs the dictionaries of the dataset that the checkpoint was trained on" in message
    assert f"(tables many, words), and {dataset.root} holds no dataset that can be read" in message
    assert "name its folder with train.warm_start.data_root=, or take row n for row n" in message
    message = refusal(old.info, grown, grow=True, data_root=str(grown.root))
    assert f"{grown.root} holds another dataset; name its folder" in message
    found = start(old.info, grown, tmp_path / "a", grow=True, data_root=str(moved))
    expected = expected_rows(
        replace(old, dataset=PreparedDataset(moved)), grown, found.fresh_tables
    )
    assert_equal_bits(found.tables, expected)

    path = moved / "vocabulary" / "words.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    keys = {"grow": True, "data_root": str(moved)}
    with pytest.raises(UserError, match=r"words.parquet is damaged: its digest"):
        start(old.info, grown, tmp_path / "b", world_size=2, **keys)  # type: ignore[arg-type]
    path.unlink()
    assert f"{path} is missing; name its folder" in refusal(old.info, grown, **keys)


def test_a_refusal_leaves_every_value_as_it_was(
    old: Old, grown: PreparedDataset, tmp_path: Path
) -> None:
    """All ranks are told the same, before anything is loaded."""
    config = {"optim": rules("adagrad", "sgd"), "train": {"warm_start": {"path": "x"}}}

    def work(trainer: Trainer) -> str:
        before = read_tables(trainer) | dense_values(trainer)
        with pytest.raises(UserError) as caught:
            warm_start(old.info, trainer.config, grown, trainer.model, trainer.embeddings)
        assert_equal_bits(read_tables(trainer) | dense_values(trainer), before)
        return str(caught.value)

    first, second = Ranks(grown, tmp_path / "run", 2, "row_wise", config).run(work)
    assert first == second
    assert "train.warm_start.grow=true" in first


def test_a_damaged_checkpoint_is_named_on_every_rank(
    old: Old, grown: PreparedDataset, tmp_path: Path
) -> None:
    folder = tmp_path / "copy" / "checkpoints" / "step-000030"
    shutil.copytree(old.info.folder, folder)
    path = folder / "rows-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    info = replace(old.info, folder=folder)
    with pytest.raises(UserError, match=r"rows-00001\.safetensors"):
        start(info, grown, tmp_path / "run", world_size=2, layout="row_wise", grow=True)


# ---------------------------------------------------------------------------- keys and the command


def test_keys_that_can_not_go_together() -> None:
    for values, said in (
        ({"rows": "tokens"}, "train.warm_start.rows=tokens: must be one of token, index"),
        ({"dense": "some"}, "train.warm_start.dense=some: must be one of all, matching, none"),
        ({"new_tables": ["a", "a"]}, r"train.warm_start.new_tables=\['a', 'a'\]: name each"),
        ({"path": "latest"}, "train.warm_start.path=latest: name the folder"),
    ):
        with pytest.raises(UserError, match=said):
            WarmStartConfig(**{"path": "run", **values})
    with pytest.raises(UserError, match=r"train.resume=latest goes .* train.warm_start.path=run"):
        TrainConfig(resume="latest", warm_start=WarmStartConfig(path="run"))
    with pytest.warns(UserWarning, match="train.warm_start.grow=True is ignored: train.warm_start"):
        WarmStartConfig(grow=True)
    with pytest.warns(UserWarning, match=r"train.warm_start.data_root=d is ignored: .*rows=index"):
        WarmStartConfig(path="run", rows="index", data_root="d")


def test_which_checkpoint_is_taken(old: Old, tmp_path: Path) -> None:
    """That of a folder, or a run's latest; never one of the run's own folder."""
    run = old.info.folder.parents[1]
    for path in (old.info.folder, run):
        config = make_config({"train": {"warm_start": {"path": str(path)}}})
        found = find_warm_start(config, tmp_path)
        assert found is not None
        assert found.folder.resolve() == old.info.folder.resolve()
        with pytest.raises(UserError, match=r"own folder; choose another with hydra\.run\.dir="):
            find_warm_start(config, run)
    assert find_warm_start(make_config({}), tmp_path) is None
    config = make_config({"train": {"warm_start": {"path": str(tmp_path / "none")}}})
    with pytest.raises(UserError, match=r"train\.warm_start\.path=.*neither a checkpoint"):
        find_warm_start(config, tmp_path)


def test_a_restarted_group_goes_on_with_its_own_run(
    old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has trained since counts, not the warm start that it once began with."""
    monkeypatch.setattr("dlrm.resume.is_restarted", lambda run_dir: True)
    given = {"path": "another", "grow": True, "dense": "none"}
    config = make_config({"train": {"warm_start": given, "overwrite": True}})
    train = with_restarts(config, old.info.folder.parents[1]).train
    assert (train.resume, train.overwrite) == ("latest", False)
    assert train.warm_start == WarmStartConfig()
    assert with_restarts(config, tmp_path) == config, "where it has kept nothing yet"


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From a run on one day's rows to one on another's: said, recorded, and of use."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)

    def train(run: str, data: str, *more: str) -> int:
        files = [f"data.raw_{part}={data}-{part}.csv" for part in ("train", "valid", "test")]
        common = ["data=adult", *files, *TINY_MODEL, "data.batch_size=64", f"data.root={data}"]
        return dlrm("train", *common, f"hydra.run.dir={run}", *more)

    for seed, day in enumerate(("one", "two")):
        for part, rows in (("train", 1200), ("valid", 300), ("test", 301)):
            write_adult_csv(tmp_path / f"{day}-{part}.csv", rows, seed=10 * seed + rows)
    assert train("first", "one", "train.epochs=4") == 0
    assert "warm_start" not in read_result(tmp_path / "first")
    capfd.readouterr()

    warm = "train.warm_start.path=first"
    assert train("refused", "two", warm) == 2
    message = capfd.readouterr().err
    assert "train.warm_start.grow=true" in message
    assert "Traceback" not in message
    assert not (tmp_path / "refused").exists()

    assert train("second", "two", warm, "train.warm_start.grow=true") == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warm ")]
    folder = latest(tmp_path / "first")
    result = read_result(tmp_path / "second")
    started = result["warm_start"]
    assert started["checkpoint"] == str(folder)
    assert started["step"] == int(folder.name.removeprefix("step-"))
    assert started["tables"].keys() == PreparedDataset(tmp_path / "two").manifest.table_rows.keys()
    assert sum(t["new"] for t in started["tables"].values()) > 0
    assert (started["new_tables"], started["dense_new"]) == ([], [])
    assert lines[0].startswith(f"warm    from step {started['step']:,} of {folder}")
    assert any("changed, by token: " in line and " rows kept, " in line for line in lines)
    assert any(line.endswith(" dense weights loaded") for line in lines)
    state = "optimizer state of kept rows comes along (adagrad), that of dense weights starts anew"
    assert f"warm    {state}" in lines
    # A run of one epoch that begins where the first one ended is ahead of one that doesn't.
    assert train("cold", "two") == 0
    aucs = [eval_lines(tmp_path / run)[0]["eval"]["auc"] for run in ("second", "cold")]
    assert aucs[0] > aucs[1] + 0.02

    assert train("second", "two", warm, "train.resume=latest") == 2
    assert "train.warm_start.path=first starts a new one" in capfd.readouterr().err


def test_f35_where_every_table_is_new_no_step_count_comes_along(
    old_of: Callable[[str], Old], wider: PreparedDataset, data: PreparedDataset, tmp_path: Path
) -> None:
    """Adam's bias correction belongs to moments that are kept; of fresh ones it would be none."""
    old = old_of("adam")
    names = list(old.info.tables)
    found = start(
        old.info, data, tmp_path / "run", rule="adam", new_tables=names, dropped_tables=names
    )
    assert found.num_row_steps == 0
    assert (found.outcome.state, found.outcome.tables) == (None, {})
    assert any("state of kept rows starts anew" in line for line in found.outcome.lines())
    some = start(
        old.info, data, tmp_path / "some", rule="adam", new_tables=names[1:],
        dropped_tables=names[1:],
    )  # fmt: skip
    assert some.num_row_steps == old.info.values["num_row_steps"] > 0
    assert some.outcome.state == "adam"


def test_f35_a_feature_that_is_pooled_otherwise_is_named(
    old: Old, data: PreparedDataset, tmp_path: Path
) -> None:
    """Its vector is another, though every shape is the same."""
    features = [
        {**feature, "pooling": "mean"} if feature["name"] == "many" else feature
        for feature in old.info.values["features"]
    ]
    info = replace(old.info, values={**old.info.values, "features": features})
    message = refusal(info, data)
    assert "sparse feature many: stored pooling mean, wanted sum" in message
    assert "feature words" not in message
    found = start(info, data, tmp_path / "run", dense="matching")
    assert any("stored pooling mean" in line for line in found.outcome.lines())
