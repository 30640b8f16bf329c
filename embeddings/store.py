"""`RowStore`: the rows of a rank's tables and their optimizer state, and nothing else.

Checkpoint, export, check and reshard read and write a store in blocks of rows; a training step
gathers and updates single rows. No call needs memory that grows with a table: only with the rows
asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from embeddings.plan import Shard, TableGroup
from embeddings.row_optim import RowOptimizerConfig, state_widths, update_rows
from embeddings.table import TableConfig, fill_uniform

WEIGHT = "weight"


class RowStore:
    """Weights and state of a rank's table groups.

    Per group one contiguous `(R, D)` weight array and one `(R, width)` array per optimizer state,
    apart from each other. A fused kernel may borrow these arrays (`weights`, `state`); there is
    never a second copy, so reads through the store see every update.

    Attributes:
        num_steps: optimizer steps begun so far; Adam's global count.

    Args:
        tables: the config of every table that the groups hold shards of.
        groups: the groups to allocate; weights start at the tables' start values, state at zero
            (and takes physical memory only once touched).
        optimizer: rule and constants of the update.
        seed: the run's seed.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        groups: Sequence[TableGroup],
        optimizer: RowOptimizerConfig,
        *,
        seed: int,
    ) -> None:
        self.num_steps = 0
        self._optimizer = optimizer
        self._groups = tuple(groups)
        self._places: dict[str, tuple[int, Shard]] = {}
        self._weights: list[Tensor] = []
        self._state: list[dict[str, Tensor]] = []
        by_name = {table.name: table for table in tables}
        for index, group in enumerate(self._groups):
            self._weights.append(torch.empty(group.num_rows, group.dim, dtype=group.dtype))
            widths = state_widths(optimizer, group.dim)
            self._state.append(
                {n: torch.zeros(group.num_rows, w, dtype=group.dtype) for n, w in widths.items()}
            )
            for shard in group.shards:
                assert shard.table not in self._places, f"two shards of table {shard.table!r}"
                self._places[shard.table] = (index, shard)
                self._fill(by_name[shard.table], index, shard, seed)
        self._tables = tuple(table for table in tables if table.name in self._places)

    def _fill(self, table: TableConfig, group: int, shard: Shard, seed: int) -> None:
        key = self._groups[group].key_offsets[shard.table]
        fill_uniform(
            self._weights[group][key : key + shard.num_rows],
            seed=seed,
            table_name=table.name,
            row_start=shard.row_start,
            col_start=shard.col_start,
            dim=table.dim,
            bound=table.default_bound,
        )

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """The tables this store holds a shard of, in the order given."""
        return self._tables

    @property
    def groups(self) -> tuple[TableGroup, ...]:
        """The table groups."""
        return self._groups

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

    def state_widths(self, table: str) -> dict[str, int]:
        """Numbers of state per row of `table`, by the state's name."""
        group, _ = self._place(table)
        return state_widths(self._optimizer, self._groups[group].dim)

    def table_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weights.nbytes for weights in self._weights)

    def state_bytes(self) -> int:
        """Bytes of all optimizer state, touched or not."""
        return sum(state.nbytes for states in self._state for state in states.values())

    def gather(self, group: int, keys_K: Tensor) -> Tensor:
        """A copy of rows, `(K, D)`.

        Args:
            group: index of the group.
            keys_K: int64 keys of the group, in any order.
        """
        return self._weights[group].index_select(0, keys_K)

    def begin_step(self) -> None:
        """Count an optimizer step; called once per step, before the groups are updated."""
        self.num_steps += 1

    def apply(self, group: int, keys_K: Tensor, grads_KD: Tensor, lr: float) -> None:
        """Update rows and their state by the rule, reading and writing only those rows.

        Args:
            group: index of the group.
            keys_K: int64 keys, distinct.
            grads_KD: one gradient per key, duplicates summed.
            lr: learning rate.
        """
        if not keys_K.numel():
            return
        weights, states = self._weights[group], self._state[group]
        rows_KD = weights.index_select(0, keys_K)
        touched = {name: state.index_select(0, keys_K) for name, state in states.items()}
        update_rows(self._optimizer, rows_KD, touched, grads_KD, lr=lr, num_steps=self.num_steps)
        weights.index_copy_(0, keys_K, rows_KD)
        for name, state in states.items():
            state.index_copy_(0, keys_K, touched[name])

    def read(self, table: str, row_start: int, row_stop: int) -> dict[str, Tensor]:
        """Copy rows and their state.

        Args:
            table: name of the table.
            row_start: first row, in the table's own numbering.
            row_stop: one past the last row.

        Returns:
            `(row_stop - row_start, width)` tensors: the weights under `weight`, each state under
            its name.

        Raises:
            ValueError: for an unknown table or rows that this store doesn't hold.
        """
        return {
            name: view.clone() for name, view in self._views(table, row_start, row_stop).items()
        }

    def write(self, table: str, row_start: int, values: Mapping[str, Tensor]) -> None:
        """Overwrite rows, their state, or some of either.

        Args:
            table: name of the table.
            row_start: first row to overwrite.
            values: as returned by `read`; names that are left out stay as they are.

        Raises:
            ValueError: for an unknown table or name, rows that this store doesn't hold, or a wrong
                shape or type. Nothing is written then.
        """
        targets: list[tuple[Tensor, Tensor]] = []
        for name, value in values.items():
            views = self._views(table, row_start, row_start + value.shape[0])
            if name not in views:
                raise ValueError(
                    f"table {table!r} has no {name!r}; with optim.sparse.name="
                    f"{self._optimizer.name} it has {list(views)}"
                )
            view = views[name]
            if value.shape != view.shape:
                raise ValueError(
                    f"table {table!r}: {name!r} of shape {tuple(value.shape)} doesn't fit "
                    f"{tuple(view.shape)}"
                )
            if value.dtype != view.dtype:
                raise ValueError(
                    f"table {table!r}: {name!r} is {value.dtype}, the table {view.dtype} "
                    f"(train.precision)"
                )
            targets.append((view, value))
        for view, value in targets:
            view.copy_(value)

    def _place(self, table: str) -> tuple[int, Shard]:
        if table not in self._places:
            raise ValueError(f"no table {table!r} here; the tables are {sorted(self._places)}")
        return self._places[table]

    def _views(self, table: str, row_start: int, row_stop: int) -> dict[str, Tensor]:
        group, shard = self._place(table)
        if not shard.row_start <= row_start <= row_stop <= shard.row_stop:
            raise ValueError(
                f"table {table!r}: rows {row_start}:{row_stop} are not within the rows "
                f"{shard.row_start}:{shard.row_stop} held here"
            )
        key = self._groups[group].key_offsets[table] + row_start - shard.row_start
        rows = slice(key, key + row_stop - row_start)
        arrays = {WEIGHT: self._weights[group], **self._state[group]}
        return {name: array[rows] for name, array in arrays.items()}
