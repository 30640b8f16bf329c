"""A plan in words: one line of at most 100 columns per table, however many shards it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embeddings.plan import Shard

# Columns of a line: 2 + 24 + 2 + 34 + 2 + 14 + 2 + 6 + 2 + 11 (`device+host`) = 99.
NAME_WIDTH = 24
_LAYOUT_WIDTH = 34
_RANKS_WIDTH = 14


def table_lines(
    shards_by_table: Mapping[str, Sequence[Shard]],
    *,
    exchange: Mapping[str, str],
    replicated: frozenset[str],
) -> Iterator[str]:
    """Per table its name, layout, ranks, exchange (`-` where nothing is exchanged) and memory."""
    width = min(max((len(name) for name in shards_by_table), default=0), NAME_WIDTH)
    for name, shards in shards_by_table.items():
        copied = name in replicated
        layout = "replicated" if copied else _layout_in_words(shards)
        ranks = ranks_in_words(sorted({shard.rank for shard in shards}))
        memory = "+".join(sorted({shard.memory for shard in shards}))
        yield (
            f"  {shortened(name):<{width}}  {layout:<{_LAYOUT_WIDTH}}  {ranks:<{_RANKS_WIDTH}}  "
            f"{'-' if copied else exchange.get(name, '?'):<6}  {memory}"
        )


def _layout_in_words(shards: Sequence[Shard]) -> str:
    rows, cols = max(s.row_stop for s in shards), max(s.col_stop for s in shards)
    if len(shards) == 1:
        return f"whole: {rows:,} × {cols}"
    if all(shard.num_cols == cols for shard in shards):
        return f"rows in {len(shards)}: {_span([s.num_rows for s in shards])}"
    if all(shard.num_rows == rows for shard in shards):
        return f"columns in {len(shards)}: {_span([s.num_cols for s in shards])}"
    return f"{len(shards)} rectangles of {rows:,} × {cols}"


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,} each" if low == high else f"{low:,} to {high:,}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3`, `ranks 0,2-3`, and `17 ranks` where that would be too long."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = "ranks " + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
    return text if len(text) <= _RANKS_WIDTH else f"{len(ranks)} ranks"


def shortened(name: str) -> str:
    """A name without its middle where it is too long: both ends tell tables apart."""
    if len(name) <= NAME_WIDTH:
        return name
    head = (NAME_WIDTH - 1) // 2
    return f"{name[:head]}…{name[head + 1 - NAME_WIDTH :]}"


def counted(number: int, noun: str) -> str:
    """`1 table`, `1,000 tables`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown_bytes(num_bytes: float) -> str:
    """`312 B`, `4.7 KiB`, `1.3 MiB`, `20.0 GiB`."""
    units = ("B", "KiB", "MiB", "GiB")
    power = 0
    while num_bytes >= 1023.95 and power < len(units) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:,.{1 if power else 0}f} {units[power]}"
