"""`sharding.…`: what is refused, the id counts of a dataset, and the plan of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.config import TrainRun, to_config
from dlrm.planning import load_table_stats, make_plan
from dlrm.sharding import ShardingConfig, TableShardingConfig
from embeddings.plan import Plan, single_process_plan
from embeddings.plan_choice import LAYOUTS
from embeddings.table import TableConfig
from tests.commands import compose_config, write_visits

TABLES = [TableConfig(name, rows, 4) for name, rows in (("shared", 13), ("many", 31))]
TABLES.append(TableConfig("words", 31, 4))


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """Features a and b share a table; `many` and `words` have bags."""
    return write_visits(tmp_path_factory.mktemp("visits"), 200)


def run_config(**sharding: Any) -> TrainRun:
    values = {
        "data": {"name": "visits", "cache": "", "batch_size": 64},
        "model": {"embedding_dim": 4},
        "sharding": sharding,
    }
    merged = OmegaConf.merge(OmegaConf.structured(TrainRun), values)
    config: TrainRun = to_config(merged)  # type: ignore[arg-type]
    return config


# ------------------------------------------------------------------------------------- the keys


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layout": "rows"}, r"sharding.layout=rows: must be one of auto, table_wise, .*, file"),
        ({"exchange": "all"}, r"sharding.exchange=all: must be one of auto, pooled, kv"),
        ({"memory": "disk"}, r"sharding.memory=disk: must be one of device, host"),
        ({"wire": "fp8"}, r"sharding.wire=fp8: must be one of fp32, bf16, fp16"),
        ({"layout": "file"}, r"sharding=file: name the file, sharding.plan="),
        ({"plan": "p.json"}, r"sharding.plan=p.json: .*sharding=file only, .*sharding=auto"),
        (
            {"layout": "file", "plan": "p.json", "exchange": "kv"},
            r"sharding.exchange=kv: with sharding=file the plan file says this",
        ),
        (
            {"layout": "file", "plan": "p.json", "tables": {"a": {"exchange": "kv"}}},
            r"sharding.tables.a: with sharding=file the plan file says this",
        ),
        (
            {"tables": {"a": {"layout": "file"}}},
            r"sharding.tables.a.layout=file: must be one of auto, .*replicated$",
        ),
        ({"tables": {"a": {"exchange": 3}}}, r"sharding.tables.a.exchange=3: must be one of"),
        ({"tables": {"a": {"rank": 3}}}, r"sharding.tables.a.rank: .*layout, exchange, ranks"),
        ({"tables": {"a": "row_wise"}}, r"sharding.tables.a=row_wise: must have the keys layout"),
        ({"tables": {"a": {"ranks": 1}}}, r"sharding.tables.a.ranks=1: must be a list"),
        ({"tables": {"a": {"ranks": []}}}, r"sharding.tables.a.ranks=\[\]: must be a list of at"),
        ({"tables": {"a": {"ranks": [0, 0]}}}, r"sharding.tables.a.ranks=\[0, 0\]: .*each once"),
        ({"tables": {"a": {"ranks": [-1]}}}, r"sharding.tables.a.ranks=\[-1\]: .*from 0"),
        ({"tables": {"a": {"ranks": ["x"]}}}, r"sharding.tables.a.ranks=\['x'\]: must be a list"),
    ],
)
def test_values_out_of_range_name_their_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ShardingConfig(**values)


def test_the_exchange_of_a_replicated_table_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"sharding.tables.a.exchange=kv is ignored: a replicated"):
        ShardingConfig(tables={"a": {"layout": "replicated", "exchange": "kv"}})


def test_overrides_of_single_tables_compose() -> None:
    """As users write them; a dict of dataclasses would refuse these overrides."""
    config = compose_config(
        "train",
        "sharding=table_wise",
        "sharding.tables.C1.layout=row_wise",
        "sharding.tables.C1.ranks=[1,0]",
        "sharding.tables.C2.exchange=pooled",
        "sharding.tables.C3={layout: replicated}",
    )
    assert config.sharding.layout == "table_wise"
    assert config.sharding.tables == {
        "C1": TableShardingConfig("row_wise", None, [1, 0]),
        "C2": TableShardingConfig(None, "pooled", None),
        "C3": TableShardingConfig("replicated", None, None),
    }
    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    stored = OmegaConf.merge(OmegaConf.structured(TrainRun), OmegaConf.create(text))
    assert to_config(stored) == config  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"sharding.tables.C1.layuot: there is no such key"):
        compose_config("train", "sharding.tables.C1.layuot=row_wise")


# ---------------------------------------------------------------------------------- the id counts


def test_stats_are_the_training_part_s_lookups(visits: PreparedDataset) -> None:
    """Against the rows themselves: two features of one table add up."""
    stats = load_table_stats(visits)
    assert list(stats) == ["shared", "many", "words"]
    for table, features in (("shared", ["a", "b"]), ("many", ["many"]), ("words", ["words"])):
        values = []
        for entry in visits.manifest.parts["train"].files:
            columns = pq.read_table(visits.root / entry.file)
            for name in features:
                column = columns[name].combine_chunks()
                flat = column.flatten() if hasattr(column, "flatten") else column
                values.append(flat.to_numpy(zero_copy_only=False))
        ids = np.concatenate(values).astype(np.int64)
        ids = ids[ids >= 0]
        expected_ids, expected_counts = np.unique(ids, return_counts=True)
        np.testing.assert_array_equal(stats[table].ids_K, expected_ids)
        np.testing.assert_array_equal(stats[table].counts_K, expected_counts)
        assert stats[table].lookups_per_sample == len(ids) / visits.num_rows("train")


def test_a_table_without_counts_has_no_stats(tmp_path: Path) -> None:
    dataset = write_visits(tmp_path, 50)
    (dataset.root / dataset.manifest.counts["b"]["file"]).unlink()
    del dataset.manifest.counts["many"]
    assert list(load_table_stats(dataset)) == ["words"], "a's counts alone aren't its table's"
    make_plan(run_config(layout="row_wise"), dataset, 3).plan.validate(TABLES)


def test_a_damaged_file_of_counts_is_named(tmp_path: Path) -> None:
    dataset = write_visits(tmp_path, 50)
    path = dataset.root / dataset.manifest.counts["many"]["file"]
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=rf"{path} can't be read .*data.overwrite=true"):
        load_table_stats(dataset)


# ------------------------------------------------------------------------------- the plan of a run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_gives_a_plan(visits: PreparedDataset, layout: str, world_size: int) -> None:
    planned = make_plan(run_config(layout=layout), visits, world_size)
    planned.plan.validate(TABLES)
    assert planned.plan.world_size == world_size
    assert list(planned.reasons) == ["shared", "many", "words"]
    again = make_plan(run_config(layout=layout), visits, world_size)
    assert again == planned
    if world_size == 1:
        assert planned.plan == single_process_plan(TABLES)


def test_overrides_reach_the_plan(visits: PreparedDataset) -> None:
    tables = {
        "many": {"layout": "column_wise", "exchange": "pooled"},
        "words": {"layout": "row_wise", "ranks": [2, 0]},
        "shared": {"layout": "replicated"},
    }
    plan = make_plan(run_config(layout="table_wise", tables=tables), visits, 3).plan
    plan.validate(TABLES)
    assert plan.is_replicated("shared")
    assert plan.exchange["many"] == "pooled"
    assert {shard.rank for shard in plan.shards_by_table()["words"]} == {0, 2}


def test_hosts_are_those_of_the_launch_or_else_the_given_ones(visits: PreparedDataset) -> None:
    config = run_config(layout="table_row_wise")

    def hosts(**given: int) -> set[int]:
        """Per table the number of ranks that hold it."""
        plan = make_plan(config, visits, 4, **given).plan  # type: ignore[arg-type]
        return {len({s.rank for s in shards}) for shards in plan.shards_by_table().values()}

    assert hosts() == {4}
    assert hosts(ranks_per_host=2) == {2}
    config.launch.ranks_per_host = 1
    assert hosts(ranks_per_host=2) == {1}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"wrods": {"layout": "row_wise"}},
            r"^sharding.tables.wrods: no such table; the tables are many, shared, words$",
        ),
        (
            {"words": {"layout": "row_wise", "ranks": [2]}},
            r"^sharding.tables.words.ranks=\[2\]: rank 2 is outside 0 to 1 \(launch.nproc\)$",
        ),
        ({"words": {"ranks": [1]}}, r"^sharding.tables.words.ranks=\[1\]: .*words.layout to one"),
    ],
)
def test_overrides_that_do_not_fit_are_the_user_s(
    visits: PreparedDataset, tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(run_config(tables=tables), visits, 2)


def test_a_plan_file_is_read_and_checked(
    visits: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(run_config(layout="row_wise"), visits, 2).plan
    Path("mine.json").write_text(plan.to_json())
    config = run_config(layout="file", plan="mine.json")
    planned = make_plan(config, visits, 2)
    assert planned.plan == plan
    assert planned.plan.digest() == plan.digest()
    assert planned.reasons["many"] == "from mine.json"

    with pytest.raises(
        UserError,
        match=r"^sharding.plan=mine.json: made for 2 ranks, but the run has 4: .*launch.nproc=2",
    ):
        make_plan(config, visits, 4)
    Path("mine.json").write_text(Plan(2, plan.shards[1:], plan.exchange).to_json())
    with pytest.raises(UserError, match=r"^sharding.plan=mine.json: table 'shared': gap: rows 0:"):
        make_plan(config, visits, 2)
    in_host = plan.to_json().replace('"device"', '"host"').replace('"pooled"', '"kv"')
    Path("mine.json").write_text(in_host)
    assert {shard.memory for shard in make_plan(config, visits, 2).plan.shards} == {"host"}
    Path("mine.json").write_text(in_host.replace('"kv"', '"pooled"'))
    with pytest.raises(UserError, match=r"in host memory has the exchange 'kv', not 'pooled'"):
        make_plan(config, visits, 2)
    Path("mine.json").write_text("{}")
    with pytest.raises(UserError, match=r"^sharding.plan=mine.json: the plan has format_version N"):
        make_plan(config, visits, 2)
    Path("mine.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"^sharding.plan=mine.json: "):
        make_plan(config, visits, 2)
    Path("mine.json").unlink()
    with pytest.raises(UserError, match=r"^sharding.plan=mine.json: can't be read \(No such file"):
        make_plan(config, visits, 2)
