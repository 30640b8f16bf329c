"""`sharding.…`: who is to hold which part of which table, and how values travel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from data.errors import UserError
from dlrm.host_config import HostConfig
from embeddings.plan import Memory
from embeddings.plan_choice import (
    LAYOUTS,
    ExchangeChoice,
    Layout,
    LayoutChoice,
    TableChoice,
)

FILE_LAYOUT = "file"
_EXCHANGES = ("auto", "pooled", "kv")
_MEMORIES = ("device", "host")
_WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass
class TableShardingConfig:
    """What holds for one table (`sharding.tables.NAME.…`); null: as for all."""

    layout: str | None = None
    """`table_wise`, `row_wise`, `column_wise`, `table_row_wise`, `replicated` or `auto`."""
    exchange: str | None = None
    """`auto`, `pooled` or `kv`."""
    ranks: list[int] | None = None
    """The ranks that hold the table, in the order of its parts; one for `table_wise`."""
    memory: str | None = None
    """`device` or `host`."""


@dataclass
class ShardingConfig:
    """Who holds which part of which table, and how values travel (`sharding.…`).

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    layout: str = "auto"
    """Set by `sharding=NAME`. `table_wise`: whole tables. `row_wise`, `column_wise`: every table
    cut over all ranks. `table_row_wise`: cut into rows over the ranks of one host. `replicated`:
    whole on every rank. `auto`: one of these for each table. `file`: as `sharding.plan` says."""
    exchange: str = "auto"
    """`pooled`: the owner of rows pools them and sends a vector per bag. `kv`: it sends each
    distinct row once. `auto`: what is expected to move fewer bytes, for each table."""
    memory: str = "device"
    """Where shards lie: `device`, or `host`, from where rows come in steps; see `host`."""
    host: HostConfig = field(default_factory=HostConfig)
    """How they come."""
    wire: str = "fp32"
    """Type of values on the way: `fp32` (the tables' own type, so fp64 under
    `train.precision=fp64`), `bf16` or `fp16`."""
    plan: str | None = None
    """`sharding=file`: a plan.json, of another run or written by hand."""
    # Not dict[str, TableShardingConfig]: OmegaConf refuses `+sharding.tables.C1.layout=…` in a dict
    # of dataclasses. __post_init__ makes a TableShardingConfig of each value.
    tables: dict[str, Any] = field(default_factory=dict)
    """What differs for single tables, by name: `layout`, `exchange`, `ranks`, `memory`."""

    def __post_init__(self) -> None:
        self.tables = {name: _table_config(name, value) for name, value in self.tables.items()}
        _check_choice("sharding.layout", self.layout, (*LAYOUTS, FILE_LAYOUT))
        _check_choice("sharding.exchange", self.exchange, _EXCHANGES)
        _check_choice("sharding.memory", self.memory, _MEMORIES)
        _check_choice("sharding.wire", self.wire, tuple(_WIRE_BYTES))
        if self.layout == FILE_LAYOUT:
            self._check_file()
        elif self.plan is not None:
            raise UserError(
                f"sharding.plan={self.plan}: a plan file is used with sharding=file only, not with "
                f"sharding={self.layout}"
            )
        for name, table in self.tables.items():
            self._check_table(f"sharding.tables.{name}", table)

    @property
    def may_use_host(self) -> bool:
        """Whether a table may be put into host memory."""
        tables = self.tables.values()
        return (
            self.memory == "host"
            or any(table.memory == "host" for table in tables)
            or self.layout == FILE_LAYOUT
        )

    def warn_of_ignored_host_keys(self) -> None:
        """Warns of every key of `host` that is set though no table may be in host memory."""
        if not self.may_use_host:
            for name, default in vars(HostConfig()).items():
                if getattr(self.host, name) != default:
                    warnings.warn(
                        f"sharding.host.{name}={getattr(self.host, name)} is ignored: no table is "
                        "in host memory (sharding.memory=device)",
                        stacklevel=4,
                    )

    def _check_file(self) -> None:
        if self.plan is None:
            raise UserError("sharding=file: name the file, sharding.plan=…/plan.json")
        given = [f"sharding.tables.{name}" for name in self.tables]
        given += [f"sharding.exchange={self.exchange}"] if self.exchange != "auto" else []
        given += [f"sharding.memory={self.memory}"] if self.memory != "device" else []
        if given:
            raise UserError(
                f"{given[0]}: with sharding=file the plan file says this for every table; leave it "
                f"out, or edit {self.plan}"
            )

    def _check_table(self, key: str, table: TableShardingConfig) -> None:
        if table.layout is not None:
            _check_choice(f"{key}.layout", table.layout, LAYOUTS)
        if table.exchange is not None:
            _check_choice(f"{key}.exchange", table.exchange, _EXCHANGES)
        if table.memory is not None:
            _check_choice(f"{key}.memory", table.memory, _MEMORIES)
        layout = table.layout or self.layout
        if layout == "replicated" and table.exchange in ("pooled", "kv"):
            warnings.warn(
                f"{key}.exchange={table.exchange} is ignored: a replicated table has no exchange",
                stacklevel=4,
            )
        if table.ranks is not None and (
            not isinstance(table.ranks, list)
            or not table.ranks
            or any(type(rank) is not int or rank < 0 for rank in table.ranks)
            or len(set(table.ranks)) < len(table.ranks)
        ):
            raise UserError(
                f"{key}.ranks={table.ranks}: must be a list of at least one rank, each once, "
                "counted from 0: [0,2]"
            )

    def choice(self) -> LayoutChoice:
        """The same for the builders of plans."""
        return LayoutChoice(
            layout=cast(Layout, self.layout),
            exchange=cast(ExchangeChoice, self.exchange),
            memory=cast(Memory, self.memory),
            wire_bytes=_WIRE_BYTES[self.wire],
            tables={
                name: TableChoice(
                    layout=cast("Layout | None", table.layout),
                    exchange=cast("ExchangeChoice | None", table.exchange),
                    ranks=None if table.ranks is None else tuple(table.ranks),
                    memory=cast("Memory | None", table.memory),
                )
                for name, table in self.tables.items()
            },
        )


def _table_config(name: str, value: Any) -> TableShardingConfig:
    """What `+sharding.tables.NAME.…` gave, as its dataclass."""
    key = f"sharding.tables.{name}"
    if isinstance(value, TableShardingConfig):
        return value
    known = [f.name for f in fields(TableShardingConfig)]
    if not isinstance(value, dict):
        raise UserError(f"{key}={value}: must have the keys {', '.join(known)}, or some of them")
    for entry in value:
        if entry not in known:
            raise UserError(f"{key}.{entry}: there is no such key; the keys are {', '.join(known)}")
    return TableShardingConfig(**value)


def _check_choice(key: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value}: must be one of {', '.join(allowed)}")
