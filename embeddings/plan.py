"""The plan: which rank holds which rectangle of which table, and how its values travel.

A plan is a value: it can be printed, written to JSON, read back and compared by its digest. It is
the only thing that decides who owns what.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, cast, get_args

from embeddings.field_checks import shown, whole_number
from embeddings.plan_words import counted, ranks_in_words, table_lines
from embeddings.table import TableConfig, validate_tables

FORMAT_VERSION = 1

_MAX_DIGITS = 40

Memory = Literal["device", "host"]
ExchangeName = Literal["pooled", "kv"]


@dataclass(frozen=True)
class Shard:
    """A rectangle of a table on one rank.

    Attributes:
        table: name of the table.
        row_start: first row.
        row_stop: one past the last row.
        col_start: first column.
        col_stop: one past the last column.
        rank: the rank that holds the rectangle and updates it.
        memory: `device` (where the dense network runs) or `host`.

    Raises:
        ValueError: for a field of another type. What `Plan.validate` refuses may be made.
    """

    table: str
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    rank: int
    memory: Memory = "device"

    def __post_init__(self) -> None:
        if not isinstance(self.table, str):
            raise ValueError(f"a shard's table is {shown(self.table)}, must be a table's name")
        for name in ("row_start", "row_stop", "col_start", "col_stop", "rank"):
            number = whole_number(f"table {self.table!r}: a shard's {name}", getattr(self, name))
            object.__setattr__(self, name, number)

    @property
    def num_rows(self) -> int:
        """Rows of the rectangle."""
        return self.row_stop - self.row_start

    @property
    def num_cols(self) -> int:
        """Columns of the rectangle: the local dim."""
        return self.col_stop - self.col_start

    def __str__(self) -> str:
        return (
            f"rows {self.row_start}:{self.row_stop} × columns {self.col_start}:{self.col_stop} "
            f"on rank {self.rank}"
        )


@dataclass(frozen=True)
class Plan:
    """The shards of every table and each table's exchange.

    The shards of a table tile it: every element lies in exactly one. The one exception is a
    *replicated* table, which lies whole on every rank.

    Attributes:
        world_size: number of ranks, `W`.
        shards: every rectangle, in the order they are listed and printed.
        exchange: per table `pooled` (the owner pools and sends one vector per bag) or `kv` (the
            requester sends unique keys and gets rows). Without meaning for a replicated table.

    Raises:
        ValueError: for a field of another type. What `validate` refuses may be made.
    """

    world_size: int
    shards: tuple[Shard, ...]
    exchange: Mapping[str, ExchangeName]

    def __post_init__(self) -> None:
        number = whole_number("the plan's world_size", self.world_size)
        object.__setattr__(self, "world_size", number)
        if not isinstance(self.shards, Sequence) or isinstance(self.shards, str):
            raise ValueError(f"the plan's shards are {shown(self.shards)}, must be a sequence")
        for shard in self.shards:
            if not isinstance(shard, Shard):
                raise ValueError(f"the plan's shards hold {shown(shard)}, which is no Shard")
        object.__setattr__(self, "shards", tuple(self.shards))
        if not isinstance(self.exchange, Mapping):
            raise ValueError(
                f"the plan's exchange is {shown(self.exchange)}, must be table: exchange pairs"
            )

    def to_json(self) -> str:
        """The plan as JSON text, which `from_json` reads back to an equal plan."""
        return json.dumps(self._fields(self.shards), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. The result is not yet validated against tables.

        Raises:
            ValueError: where the text isn't a plan of this format version, naming the field and,
                of a shard, its table and rank.
        """
        return _read_plan(text)

    def digest(self) -> str:
        """sha256 of the canonical JSON, which doesn't depend on the order of the shards."""
        ordered = sorted(self.shards, key=lambda s: (s.table, s.row_start, s.col_start, s.rank))
        text = json.dumps(self._fields(ordered), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _fields(self, shards: Sequence[Shard]) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "world_size": self.world_size,
            "shards": [asdict(shard) for shard in shards],
            "exchange": dict(self.exchange),
        }

    @cached_property
    def _replicated(self) -> frozenset[str]:
        shards = self.shards_by_table()
        return frozenset(name for name in shards if self._is_copied(shards[name]))

    def _is_copied(self, shards: Sequence[Shard]) -> bool:
        """Whether the shards of one table are one rectangle, once on every rank."""
        ranks = [shard.rank for shard in shards]
        rectangles = {(s.row_start, s.row_stop, s.col_start, s.col_stop) for s in shards}
        return (
            self.world_size > 1
            and len(rectangles) == 1
            and len(ranks) == self.world_size
            and sorted(ranks) == list(range(self.world_size))
        )

    def is_replicated(self, table: str) -> bool:
        """Whether `table` lies whole on each of several ranks; False with one rank."""
        return table in self._replicated

    def shards_by_table(self) -> dict[str, list[Shard]]:
        """The shards of each table, both in the plan's order."""
        by_table: dict[str, list[Shard]] = {}
        for shard in self.shards:
            by_table.setdefault(shard.table, []).append(shard)
        return by_table

    def validate(self, tables: Sequence[TableConfig]) -> None:
        """Check that the shards of every table tile it, or are a whole copy on every rank.

        Raises:
            ValueError: naming the table, the rank where there is one, and the broken rule.
        """
        validate_tables(tables, ())
        if self.world_size < 1:
            raise ValueError(f"the plan's world_size is {self.world_size}, must be at least 1")
        known = {table.name: table for table in tables}
        for shard in self.shards:
            _validate_shard(shard, known.get(shard.table), self.world_size)
        for name in self.exchange:
            if name not in known:
                raise ValueError(f"table {name!r}: the plan gives an exchange for an unknown table")
        by_table = self.shards_by_table()
        for table in tables:
            _check_exchange(table.name, self.exchange.get(table.name))
            shards = by_table.get(table.name, [])
            _check_host(
                table.name, shards, self.exchange[table.name], self.is_replicated(table.name)
            )
            copies = [s for s in shards if (s.num_rows, s.num_cols) == (table.rows, table.dim)]
            if len(copies) > 1 and self.world_size > 1:
                _validate_copies(table, shards, copies, self.world_size)
            else:
                _validate_cover(table, shards)

    def describe(self) -> list[str]:
        """The plan as lines of at most 100 columns: a heading, then one line per table."""
        by_table = self.shards_by_table()
        return [
            f"plan {self.digest()[:12]}: {counted(len(by_table), 'table')}, "
            f"{counted(len(self.shards), 'shard')}, {counted(self.world_size, 'rank')}",
            *table_lines(
                by_table,
                exchange=self.exchange,
                replicated=frozenset(name for name in by_table if self.is_replicated(name)),
            ),
        ]


def single_process_plan(tables: Sequence[TableConfig]) -> Plan:
    """The plan of one process: every table whole on rank 0, with `kv` as its (unused) exchange."""
    shards = tuple(Shard(table.name, 0, table.rows, 0, table.dim, rank=0) for table in tables)
    return Plan(world_size=1, shards=shards, exchange={table.name: "kv" for table in tables})


def _validate_shard(shard: Shard, table: TableConfig | None, world_size: int) -> None:
    if table is None:
        raise ValueError(f"table {shard.table!r}: shard of an unknown table ({shard})")
    if not 0 <= shard.rank < world_size:
        raise ValueError(
            f"table {shard.table!r}: rank {shard.rank} is outside 0 to {world_size - 1} ({shard})"
        )
    if not isinstance(shard.memory, str) or shard.memory not in get_args(Memory):
        raise ValueError(
            f"table {shard.table!r}, rank {shard.rank}: memory is {shard.memory!r}, must be "
            f"'device' or 'host' (sharding.memory)"
        )
    rows_fit = 0 <= shard.row_start < shard.row_stop <= table.rows
    cols_fit = 0 <= shard.col_start < shard.col_stop <= table.dim
    if not rows_fit or not cols_fit:
        raise ValueError(
            f"table {shard.table!r}, rank {shard.rank}: a shard must be a non-empty rectangle "
            f"within {table.rows} rows × {table.dim} columns, not {shard}"
        )


def _check_host(
    name: str, shards: Sequence[Shard], exchange: ExchangeName, is_replicated: bool
) -> None:
    """Of a table in host memory: its rows travel by keys, and it isn't replicated."""
    in_host = [shard for shard in shards if shard.memory == "host"]
    if in_host and is_replicated:
        raise ValueError(
            f"table {name!r}, rank {in_host[0].rank}: a replicated table lies in the device memory "
            "of every rank, not in host memory (sharding.memory)"
        )
    if in_host and exchange != "kv":
        raise ValueError(
            f"table {name!r}: a table in host memory has the exchange 'kv', not {exchange!r} "
            "(sharding.exchange)"
        )


def _validate_copies(
    table: TableConfig, shards: Sequence[Shard], copies: Sequence[Shard], world_size: int
) -> None:
    """Of a table with several whole copies: one on every rank, and nothing else."""
    rule = (
        f"a table is replicated as one whole copy on each of the ranks 0 to {world_size - 1}, "
        f"or its shards must not overlap"
    )
    copied = sorted(shard.rank for shard in copies)
    for rank, num_copies in Counter(copied).items():
        if num_copies > 1:
            raise ValueError(
                f"table {table.name!r}, rank {rank}: overlap: {num_copies} whole copies "
                f"on one rank; {rule}"
            )
    for shard in shards:
        if shard not in copies:
            raise ValueError(
                f"table {table.name!r}, rank {shard.rank}: overlap: {shard} beside whole copies "
                f"on {ranks_in_words(copied)}; {rule}"
            )
    # Every one is on another rank: where one of the ranks has none, it is found in few steps.
    rank = next((rank for rank, copy in enumerate(copied) if rank != copy), len(copied))
    if rank < world_size:
        raise ValueError(
            f"table {table.name!r}, rank {rank}: overlap: there are whole copies on "
            f"{ranks_in_words(copied)}, but none on rank {rank}; {rule}"
        )


def _validate_cover(table: TableConfig, shards: Sequence[Shard]) -> None:
    """Sweep the bands between row borders; in each, the shards must tile the columns."""
    ordered = sorted(shards, key=lambda shard: shard.row_start)
    borders = sorted({0, table.rows, *(s.row_start for s in shards), *(s.row_stop for s in shards)})
    active: list[Shard] = []
    upcoming = 0
    for row, row_stop in pairwise(borders):
        active = [shard for shard in active if shard.row_stop > row]
        while upcoming < len(ordered) and ordered[upcoming].row_start == row:
            active.append(ordered[upcoming])
            upcoming += 1
        active.sort(key=lambda shard: shard.col_start)
        covered = 0
        for index, shard in enumerate(active):
            if shard.col_start < covered:
                raise ValueError(
                    f"table {table.name!r}: overlap: {active[index - 1]} and {shard} share rows "
                    f"{row}:{row_stop}"
                )
            if shard.col_start > covered:
                break
            covered = shard.col_stop
        if covered < table.dim:
            gap_stop = min(
                (s.col_start for s in active if s.col_start > covered), default=table.dim
            )
            raise ValueError(
                f"table {table.name!r}: gap: rows {row}:{row_stop} × columns {covered}:{gap_stop} "
                f"are on no rank"
            )


# ------------------------------------------------------------------------------------ from JSON


def _read_plan(text: str) -> Plan:
    try:
        entries = json.loads(text, object_pairs_hook=_unique_entries, parse_int=_read_int)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the plan is not JSON: {error}") from error
    version = entries.get("format_version") if isinstance(entries, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(
            f"the plan has format_version {shown(version)}, this program reads {FORMAT_VERSION}"
        )
    names = ("format_version", "world_size", "shards", "exchange")
    _check_fields("the plan", entries, required=names, known=names)
    shards, exchange = entries["shards"], entries["exchange"]
    if not isinstance(shards, list):
        raise ValueError(f"the plan: shards is {shown(shards)}, must be a list")
    if not isinstance(exchange, dict):
        raise ValueError(f"the plan: exchange is {shown(exchange)}, must be table: exchange pairs")
    for name, value in exchange.items():
        _check_exchange(name, value)
    return Plan(
        world_size=_read_number("the plan", entries, "world_size", minimum=1),
        shards=tuple(_read_shard(number, entry) for number, entry in enumerate(shards)),
        exchange=exchange,
    )


def _read_shard(number: int, entry: Any) -> Shard:
    if not isinstance(entry, dict):
        raise ValueError(f"shard {number}: is {shown(entry)}, must be an object with its fields")
    # Whoever wrote the plan looks for the table, not for the shard's place in the list.
    where = f"shard {number}"
    where += f" (table {shown(entry['table'])}" if "table" in entry else " (no table"
    where += f", rank {shown(entry['rank'])})" if "rank" in entry else ")"
    known = tuple(field.name for field in fields(Shard))
    required = tuple(name for name in known if name != "memory")
    _check_fields(where, entry, required=required, known=known)
    table, memory = entry["table"], entry.get("memory", "device")
    if not isinstance(table, str):
        raise ValueError(f"{where}: table is {shown(table)}, must be the name of a table")
    if memory not in get_args(Memory):
        raise ValueError(
            f"{where}: memory is {shown(memory)}, must be 'device' or 'host' (sharding.memory)"
        )
    row_start, row_stop, col_start, col_stop, rank = (
        _read_number(where, entry, name, minimum=0) for name in known[1:6]
    )
    return Shard(table, row_start, row_stop, col_start, col_stop, rank, cast(Memory, memory))


def _check_fields(
    where: str, entry: Mapping[str, Any], *, required: Sequence[str], known: Sequence[str]
) -> None:
    for name in entry:
        if name not in known:
            raise ValueError(
                f"{where}: there is no field {name!r}; the fields are {', '.join(known)}"
            )
    for name in required:
        if name not in entry:
            raise ValueError(f"{where}: the field {name!r} is missing")


def _read_number(where: str, entry: Mapping[str, Any], name: str, *, minimum: int) -> int:
    value = entry[name]
    if type(value) is not int:  # A bool is an int, and must not pass.
        raise ValueError(f"{where}: {name} is {shown(value)}, must be a whole number")
    if value < minimum:
        raise ValueError(f"{where}: {name} is {value}, must be at least {minimum}")
    return value


def _check_exchange(table: str, exchange: Any) -> None:
    if exchange not in get_args(ExchangeName):
        raise ValueError(
            f"table {table!r}: exchange is {shown(exchange)}, must be 'pooled' or 'kv' "
            f"(sharding.exchange)"
        )


def _read_int(digits: str) -> int:
    """A whole number of a JSON text: Python reads no number of thousands of digits."""
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"the plan: {digits[:20]}… is a number of {len(digits):,} digits")
    return int(digits)


def _unique_entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; `json` itself would keep the last of two entries of one name."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"the plan: {name!r} is given twice in one object")
        entries[name] = value
    return entries
