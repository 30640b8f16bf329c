"""`RowStore`: the rows of a rank's tables and their optimizer state, and nothing else.

Checkpoint, export, check and reshard read and write a store in blocks of rows; a training step
gathers and updates single rows. No call needs memory that grows with a table: only with the rows
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embeddings.compiled import in_parts
from embeddings.keys import sorted_stretch
from embeddings.machine import available_bytes
from embeddings.row_memory import TablesDontFit, rows_to_fill
from embeddings.row_optim import ROW_STATE, RowOptimizerConfig, state_widths
from embeddings.row_update import update_in_place
from embeddings.table import TableConfig, fill_uniform
from embeddings.table_group import Piece, TableGroup

WEIGHT = "weight"
_BLOCK_ROWS = 65_536
_FILL_ELEMENTS = 1 << 24
"""Start values between two beats: a fraction of a second of one thread."""


class RowStore:
    """Weights and state of a rank's table groups.

    Per group one contiguous `(R, D)` weight array and one `(R, width)` array per optimizer state,
    apart from each other. A fused kernel may borrow these arrays (`weights`, `state`); there is
    never a second copy, so reads through the store see every update.

    Attributes:
        num_steps: optimizer steps begun so far; Adam's global count.
        before_whole_rows: called before whole rows are read or written (`read`, `read_parts`,
            `write`): has the newest values here, where rows are copied elsewhere.

    Args:
        tables: the config of every table that the groups hold pieces of.
        groups: the groups to allocate; weights start at the tables' start values, state at zero
            (and takes physical memory only once touched).
        optimizer: rule and constants of the update.
        seed: the run's seed.
        dtype: type of weights and state; None: that of the groups, of which there must be one.
        fill: False: weights are left as they come, since all of them are to be loaded.
        beat: called while weights are filled.

    Raises:
        TablesDontFit: naming the tables that the system has no memory for.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        groups: Sequence[TableGroup],
        optimizer: RowOptimizerConfig,
        *,
        seed: int,
        dtype: torch.dtype | None = None,
        fill: bool = True,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_steps = 0
        self.before_whole_rows: Callable[[], None] = lambda: None
        self._optimizer = optimizer
        self._groups = tuple(groups)
        self._dtype = dtype or self._groups[0].dtype
        self._places: dict[str, list[_Place]] = {}
        self._weights: list[Tensor] = []
        self._state: list[dict[str, Tensor]] = []
        by_name = {table.name: table for table in tables}
        for index, group in enumerate(self._groups):
            self._allocate(group)
            for piece, key in zip(group.pieces, group.first_keys, strict=True):
                place = _Place(index, key, piece)
                self._places.setdefault(piece.table, []).append(place)
                if fill:
                    self._fill(by_name[piece.table], place, seed, beat)
        self._tables = tuple(table for table in tables if table.name in self._places)
        self._dims = {table.name: table.dim for table in tables}

    def _allocate(self, group: TableGroup) -> None:
        widths = state_widths(self._optimizer, group.dim)
        try:
            weights = rows_to_fill(group.num_rows, group.dim, group.dtype)
            state = {
                n: torch.zeros(group.num_rows, w, dtype=group.dtype) for n, w in widths.items()
            }
        except (OSError, RuntimeError, OverflowError, MemoryError) as error:
            names = list(dict.fromkeys(piece.table for piece in group.pieces))
            width = group.dim + sum(widths.values())
            raise TablesDontFit(
                names, group.num_rows * width * group.dtype.itemsize, available_bytes()
            ) from error
        self._weights.append(weights)
        self._state.append(state)

    def _fill(self, table: TableConfig, place: _Place, seed: int, beat: Callable[[], None]) -> None:
        """Start values, by as many threads as torch has: they don't depend on who fills them."""
        piece = place.piece
        rows_RD = self._weights[place.group][place.key : place.key + piece.num_rows]

        def fill(first: int, stop: int, block: int) -> None:
            column = 0
            for start, end in piece.columns:
                fill_uniform(
                    rows_RD[block + first : block + stop, column : column + end - start],
                    seed=seed,
                    table_name=table.name,
                    row_start=piece.row_start + block + first,
                    col_start=start,
                    dim=table.dim,
                    bound=table.default_bound,
                )
                column += end - start

        block_rows = max(1, _FILL_ELEMENTS // piece.dim)
        for block in range(0, piece.num_rows, block_rows):
            beat()
            in_parts(fill, min(block_rows, piece.num_rows - block), block)

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """The tables this store holds a piece of, in the order given."""
        return self._tables

    @property
    def groups(self) -> tuple[TableGroup, ...]:
        """The table groups."""
        return self._groups

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and state."""
        return self._dtype

    @property
    def optimizer(self) -> RowOptimizerConfig:
        """Rule and constants of the update."""
        return self._optimizer

    def weights(self, group: int) -> Tensor:
        """The `(R, D)` weights of a group: the store's own memory."""
        return self._weights[group]

    def state(self, group: int) -> Mapping[str, Tensor]:
        """The `(R, width)` states of a group by name: the store's own memory."""
        return self._state[group]

    def arrays(self, group: int) -> list[Tensor]:
        """The weights of a group, then each of its states: the store's own memory."""
        return [self._weights[group], *self._state[group].values()]

    def state_widths(self, table: str) -> dict[str, int]:
        """Numbers of state per row of `table`, by the state's name."""
        if table not in self._dims:
            raise ValueError(f"no table {table!r} here; the tables are {sorted(self._dims)}")
        return state_widths(self._optimizer, self._dims[table])

    def piece_state_widths(self, piece: Piece) -> dict[str, int]:
        """Numbers of state per row that a piece holds: of state that belongs to whole rows, only
        the piece with the first column."""
        widths = state_widths(self._optimizer, piece.dim)
        if not piece.has_first_column and self._optimizer.name in ROW_STATE:
            del widths[ROW_STATE[self._optimizer.name]]
        return widths

    def table_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weights.nbytes for weights in self._weights)

    def state_bytes(self) -> int:
        """Bytes of all optimizer state, touched or not."""
        return sum(state.nbytes for states in self._state for state in states.values())

    def places(self, table: str) -> list[_Place]:
        """Where the pieces of a table lie that this rank holds; none: an empty list."""
        return self._places.get(table, [])

    def is_finite(self) -> bool:
        """Whether every weight and every state here is a finite number; in blocks of rows."""
        arrays = [*self._weights, *(state for states in self._state for state in states.values())]
        return all(
            bool(torch.isfinite(block).all())
            for array in arrays
            for block in array.split(_BLOCK_ROWS)
        )

    def gather(self, group: int, keys_K: Tensor) -> Tensor:
        """A copy of rows, `(K, D)`.

        Args:
            group: index of the group.
            keys_K: int64 keys of the group, in any order.
        """
        return self._weights[group].index_select(0, keys_K)

    def gather_all(self, group: int, keys_K: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of rows, as `gather`, and of their states by name."""
        states = {n: s.index_select(0, keys_K) for n, s in self._state[group].items()}
        return self.gather(group, keys_K), states

    def begin_step(self) -> None:
        """Count an optimizer step; called once per step, before the groups are updated."""
        self.num_steps += 1

    def apply(
        self,
        group: int,
        keys_K: Tensor,
        grads_KD: Tensor,
        lr: float,
        row_state_K1: Tensor | None = None,
    ) -> None:
        """Update rows and their state by the rule, reading and writing only those rows.

        Args:
            group: index of the group.
            keys_K: int64 keys, distinct.
            grads_KD: one gradient per key, duplicates summed.
            lr: learning rate.
            row_state_K1: the new value of a state that belongs to whole rows, where the caller has
                made it up from all columns; kept where the piece has the first column. `keys_K` are
                sorted then. None: it follows from `grads_KD`.
        """
        if not keys_K.numel():
            return
        states = self._state[group]
        update_in_place(
            self._optimizer,
            self._weights[group],
            states,
            keys_K,
            grads_KD,
            lr=lr,
            num_steps=self.num_steps,
            row_state_K1=row_state_K1,
        )
        if row_state_K1 is not None:
            (state,) = states.values()
            for low, high in self.with_first_column(group, keys_K):
                state.index_copy_(0, keys_K[low:high], row_state_K1[low:high])

    def with_first_column(self, group: int, keys_K: Tensor) -> list[tuple[int, int]]:
        """Positions of the sorted keys that lie in pieces with the first column, half-open."""
        table_group = self._groups[group]
        return [
            sorted_stretch(keys_K, key, key + piece.num_rows)
            for piece, key in zip(table_group.pieces, table_group.first_keys, strict=True)
            if piece.has_first_column
        ]

    def read(self, table: str, row_start: int, row_stop: int) -> dict[str, Tensor]:
        """Copy whole rows and their state.

        Args:
            table: name of the table.
            row_start: first row, in the table's own numbering.
            row_stop: one past the last row.

        Returns:
            `(row_stop - row_start, width)` tensors: the weights under `weight`, each state under
            its name.

        Raises:
            ValueError: for an unknown table, or rows that this store doesn't hold whole.
        """
        parts = self.read_parts(table, row_start, row_stop)
        self._check_whole(table, row_start, row_stop, [part.piece for part in parts])
        return assemble_rows(
            self._dims[table], self.state_widths(table), row_start, row_stop, parts, self._dtype
        )

    def write(self, table: str, row_start: int, values: Mapping[str, Tensor]) -> None:
        """Overwrite the parts of rows that this rank holds, their state, or some of either.

        Args:
            table: name of the table.
            row_start: first row to overwrite.
            values: whole rows, as `read` returns them; names that are left out stay as they are.

        Raises:
            ValueError: for an unknown table or name, rows outside the table's here, or a wrong
                shape or type. Nothing is written then.
        """
        widths = {WEIGHT: self._dims.get(table, 0), **self.state_widths(table)}
        num_rows = {value.shape[0] for value in values.values()}
        for name, value in values.items():
            if name not in widths:
                raise ValueError(
                    f"table {table!r} has no {name!r}; with optim.sparse.name="
                    f"{self._optimizer.name} it has {list(widths)}"
                )
            if value.dim() != 2 or value.shape[1] != widths[name] or len(num_rows) > 1:
                raise ValueError(
                    f"table {table!r}: {name!r} of shape {tuple(value.shape)} doesn't fit "
                    f"({max(num_rows)}, {widths[name]})"
                )
            if value.dtype != self._dtype:
                raise ValueError(
                    f"table {table!r}: {name!r} is {value.dtype}, the table {self._dtype} "
                    f"(train.precision)"
                )
        self.before_whole_rows()
        row_stop = row_start + max(num_rows, default=0)
        table_rows = next((t.rows for t in self._tables if t.name == table), row_stop)
        if row_start < 0 or row_stop > table_rows:
            raise ValueError(
                f"table {table!r}: rows {row_start}:{row_stop} are not within its {table_rows} rows"
            )
        for place in self.places(table):
            first, stop, views = self._views(place, row_start, row_stop)
            for name, view in views.items():
                if name in values and first < stop:
                    rows = values[name][first - row_start : stop - row_start]
                    view.copy_(take_columns(rows, place.piece, self._dims[table]))

    def read_parts(self, table: str, row_start: int, row_stop: int) -> list[RowsPart]:
        """Views of what this rank holds of some rows of a table; possibly nothing.

        Raises:
            ValueError: for an unknown table.
        """
        self.state_widths(table)
        self.before_whole_rows()
        parts: list[RowsPart] = []
        for place in self.places(table):
            first, stop, views = self._views(place, row_start, row_stop)
            if first < stop:
                parts.append(RowsPart(place.piece, first, stop, views))
        return parts

    def _views(
        self, place: _Place, row_start: int, row_stop: int
    ) -> tuple[int, int, dict[str, Tensor]]:
        """The rows of a place within `row_start:row_stop`, as (first, stop, values by name).

        State that belongs to whole rows is that of the piece with the first column only.
        """
        piece = place.piece
        first = max(row_start, piece.row_start)
        stop = max(first, min(row_stop, piece.row_stop))
        key = place.key + first - piece.row_start
        arrays = {WEIGHT: self._weights[place.group], **self._state[place.group]}
        names = [WEIGHT, *self.piece_state_widths(piece)]
        return first, stop, {name: arrays[name][key : key + stop - first] for name in names}

    def _check_whole(
        self, table: str, row_start: int, row_stop: int, pieces: Sequence[Piece]
    ) -> None:
        held = sum(
            (min(row_stop, p.row_stop) - max(row_start, p.row_start)) * p.dim for p in pieces
        )
        wanted = (row_stop - row_start) * self._dims[table]
        if row_start < 0 or row_stop < row_start or held != wanted:
            here = "; ".join(str(place.piece) for place in self.places(table)) or "nothing of it"
            raise ValueError(
                f"table {table!r}: rows {row_start}:{row_stop} are not held whole here, but {here}"
            )


class _Place(NamedTuple):
    """Where a piece lies in a store: rows `key … key + piece.num_rows - 1` of `group`."""

    group: int
    key: int
    piece: Piece


class RowsPart(NamedTuple):
    """What one piece holds of some rows.

    Attributes:
        piece: the piece.
        row_start: first row of the part.
        row_stop: one past the last.
        values: `(row_stop - row_start, width)` by name, the piece's columns side by side.
    """

    piece: Piece
    row_start: int
    row_stop: int
    values: Mapping[str, Tensor]


def assemble_rows(
    dim: int,
    state_widths: Mapping[str, int],
    row_start: int,
    row_stop: int,
    parts: Sequence[RowsPart],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Whole rows from parts that cover them; a copy.

    Args:
        dim: columns of the table.
        state_widths: numbers of state per row, by name.
        row_start: first row.
        row_stop: one past the last.
        parts: of any ranks.
        dtype: type of weights and state.
    """
    whole = {
        name: torch.empty(row_stop - row_start, width, dtype=dtype)
        for name, width in {WEIGHT: dim, **state_widths}.items()
    }
    for part in parts:
        rows = slice(part.row_start - row_start, part.row_stop - row_start)
        for name, values in part.values.items():
            target = whole[name][rows]
            if target.shape[1] != dim:
                target.copy_(values)  # One number per row.
                continue
            column = 0
            for start, stop in part.piece.columns:
                target[:, start:stop] = values[:, column : column + stop - start]
                column += stop - start
    return whole


def take_columns(rows: Tensor, piece: Piece, dim: int) -> Tensor:
    """What a piece holds of whole rows, `(R, dim)`: its columns, side by side. Of state with one
    number per row, all."""
    if rows.shape[1] != dim:
        return rows
    return torch.cat([rows[:, start:stop] for start, stop in piece.columns], dim=1)
