"""`sharding.memory` and `sharding.host.…`: what is refused, ignored with a warning, and placed."""

from __future__ import annotations

from typing import Any

import pytest

from data.errors import UserError
from dlrm.config import BenchRun, TrainRun
from dlrm.host_config import HostConfig
from dlrm.sharding import ShardingConfig, TableShardingConfig
from embeddings import FeatureConfig, TableConfig
from embeddings.plan_builders import build_plan
from embeddings.plan_choice import LayoutChoice, TableChoice

TABLES = (TableConfig("big", 100_000, 8), TableConfig("small", 4, 8))
FEATURES = (FeatureConfig("a", "big"), FeatureConfig("b", "small"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "magic"}, r"sharding.host.mode=magic: must be one of auto, gather, lookahead"),
        ({"hot_mb": -1.0}, r"sharding.host.hot_mb=-1: must be at least 0"),
        ({"lookahead": 0}, r"sharding.host.lookahead=0: must be 1 to 8"),
        ({"lookahead": 9}, r"sharding.host.lookahead=9: must be 1 to 8"),
        ({"staging_mb": 0.0}, r"sharding.host.staging_mb=0: must be above 0"),
        ({"hot_from": "guess"}, r"sharding.host.hot_from=guess: must be counts or sample"),
        ({"sample_share": 0.0}, r"sharding.host.sample_share=0: must be above 0"),
        ({"whole_rows": -1}, r"sharding.host.whole_rows=-1: must be at least 0"),
        ({"drift": 1.5}, r"sharding.host.drift=1.5: must be between 0 and 1"),
    ],
)
def test_values_out_of_range_name_their_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HostConfig(**values)


def test_host_keys_without_host_tables_are_warned_of() -> None:
    sharding = ShardingConfig(host=HostConfig(lookahead=4))
    with pytest.warns(UserWarning, match=r"sharding.host.lookahead=4 is ignored: no table is in"):
        TrainRun(sharding=sharding)
    # The benchmark has tables of its own in host memory.
    BenchRun(sharding=sharding, kind="host")


def test_host_keys_with_one_host_table_are_read() -> None:
    sharding = ShardingConfig(
        host=HostConfig(lookahead=4), tables={"big": TableShardingConfig(memory="host")}
    )
    assert sharding.may_use_host
    assert sharding.choice().tables["big"].memory == "host"


def place(choice: LayoutChoice, world_size: int = 2) -> dict[str, set[str]]:
    plan = build_plan(TABLES, FEATURES, {}, choice, world_size, world_size, 64).plan
    plan.validate(TABLES)
    return {name: {s.memory for s in of} for name, of in plan.shards_by_table().items()}


def test_what_auto_replicates_stays_on_the_device() -> None:
    assert place(LayoutChoice("auto", memory="host")) == {"big": {"host"}, "small": {"device"}}


def test_one_table_may_lie_elsewhere() -> None:
    choice = LayoutChoice("row_wise", tables={"big": TableChoice(memory="host")})
    assert place(choice) == {"big": {"host"}, "small": {"device"}}
    choice = LayoutChoice("row_wise", memory="host", tables={"big": TableChoice(memory="device")})
    assert place(choice) == {"big": {"device"}, "small": {"host"}}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            LayoutChoice("replicated", memory="host"),
            r"sharding.memory=host: table 'big' is replicated, .*choose another layout",
        ),
        (
            LayoutChoice("auto", tables={"small": TableChoice("replicated", memory="host")}),
            r"sharding.tables.small.memory=host: table 'small' is replicated",
        ),
        (
            LayoutChoice("row_wise", "pooled", memory="host"),
            r"sharding.exchange=pooled: table 'big' is in host memory, .*set kv or auto",
        ),
    ],
)
def test_what_host_memory_cannot_have(choice: LayoutChoice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(choice)


def test_in_one_process_a_replicated_table_is_a_whole_one() -> None:
    assert place(LayoutChoice("replicated", memory="host"), 1) == {
        "big": {"host"},
        "small": {"host"},
    }
