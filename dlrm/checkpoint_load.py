"""Puts a checkpoint's model, and what its training needs to go on, in place; under any plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from data.errors import UserError
from dlrm.checkpoint import CheckpointInfo
from dlrm.checkpoint_rows import RowsReader, StoredTable
from dlrm.interaction import DotInteraction
from dlrm.model import DLRM
from dlrm.tensor_file import DamagedError, dtype_name
from embeddings.communicator import Communicator
from embeddings.sharded import ShardedEmbeddings
from embeddings.store import WEIGHT, RowsPart, RowStore
from embeddings.table import TableConfig


def load_model(
    info: CheckpointInfo,
    model: nn.Module,
    embeddings: ShardedEmbeddings,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Loads dense weights, and those rows that this rank holds; optimizer state is not read.

    Called by all ranks.

    Raises:
        UserError: on all ranks alike, where tables or shapes differ (before anything is loaded), or
            a file is damaged.
    """
    check_tables(info, embeddings, state=False)
    on_all_ranks(embeddings.comm, lambda: _check_dense(info, model))
    on_all_ranks(embeddings.comm, lambda: _load_model(info, model, embeddings, beat, state=False))


def load_training(
    info: CheckpointInfo,
    model: nn.Module,
    embeddings: ShardedEmbeddings,
    dense_optimizer: torch.optim.Optimizer,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Loads everything that training changes: weights and optimizer state, of rows too, and the
    number of steps that the optimizers count.

    Called by all ranks; raises as `load_model`.
    """
    check_tables(info, embeddings, state=True)
    on_all_ranks(embeddings.comm, lambda: _check_dense(info, model))

    def load() -> None:
        _load_model(info, model, embeddings, beat, state=True)
        _load_dense_state(info, model, dense_optimizer)
        embeddings.store.num_steps = info.values["num_row_steps"]

    on_all_ranks(embeddings.comm, load)


def check_tables(info: CheckpointInfo, embeddings: ShardedEmbeddings, *, state: bool) -> None:
    """Refuses a checkpoint of other tables.

    Raises:
        UserError: listing what differs, by table.
    """
    store = embeddings.store

    def said(table: StoredTable) -> str:
        if not state:
            return _shape_of(table)
        widths = ", ".join(f"{name} ({width})" for name, width in table.state_widths.items())
        return f"{_shape_of(table)}, state {widths or 'none'}"

    stored = {name: said(table) for name, table in info.tables.items()}
    wanted = {
        t.name: said(StoredTable(t.rows, t.dim, embeddings.dtype, store.state_widths(t.name)))
        for t in embeddings.tables
    }
    _refuse(info, "tables", stored, wanted)


def check_shapes(info: CheckpointInfo, tables: Sequence[TableConfig], model: nn.Module) -> None:
    """Refuses a checkpoint of other tables or dense weights, before any table is made.

    Raises:
        UserError: listing what differs.
    """
    dtype = next(model.parameters()).dtype
    stored = {name: _shape_of(table) for name, table in info.tables.items()}
    wanted = {t.name: _shape_of(StoredTable(t.rows, t.dim, dtype, {})) for t in tables}
    _refuse(info, "tables", stored, wanted)
    _check_dense(info, model)


def _shape_of(table: StoredTable) -> str:
    return f"{table.rows:,} rows of {table.dim}, {dtype_name(table.dtype)}"


def _check_dense(info: CheckpointInfo, model: nn.Module) -> None:
    def said(tensor: torch.Tensor) -> str:
        return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"

    stored = {name: said(tensor) for name, tensor in info.dense().items()}
    wanted = {name: said(tensor) for name, tensor in model.state_dict().items()}
    _refuse(info, "dense weights", stored, wanted, _about_dot(info, model))


def _about_dot(info: CheckpointInfo, model: nn.Module) -> str:
    """What to say of a model without dense columns whose top MLP saw products of pairs only."""
    if not isinstance(model, DLRM) or not isinstance(model.interaction, DotInteraction):
        return ""
    first = info.dense().get("head.weight" if len(model.top) == 0 else "top.0.weight")
    if model.bottom is not None or first is None or first.shape[1] != model.interaction.num_pairs:
        return ""
    return (
        "\nit is of a version whose model.interaction=dot gave the top MLP, where the data have no "
        "dense columns, products of pairs and not the features themselves: train anew, or use it "
        "with that version"
    )


def _refuse(
    info: CheckpointInfo,
    what: str,
    stored: dict[str, str],
    wanted: dict[str, str],
    reason: str = "",
) -> None:
    differing = [
        f"{name}: stored {stored.get(name, 'not at all')}, wanted {wanted.get(name, 'not at all')}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
    if differing:
        listed = "\n  ".join(differing)
        raise UserError(f"the {what} of {info.folder} differ:\n  {listed}{reason}")


def _load_model(
    info: CheckpointInfo,
    model: nn.Module,
    embeddings: ShardedEmbeddings,
    beat: Callable[[], None],
    *,
    state: bool,
) -> None:
    model.load_state_dict(info.dense())
    store = embeddings.store
    reader = info.rows()
    try:
        for table in store.tables:
            for part in store.read_parts(table.name, 0, table.rows):
                if not reader.fill(part, part.values if state else [WEIGHT], beat):
                    _write_part(info, reader, store, part, beat, state=state)
    finally:
        reader.close()
    embeddings.rows_changed()


def _write_part(
    info: CheckpointInfo,
    reader: RowsReader,
    store: RowStore,
    part: RowsPart,
    beat: Callable[[], None],
    *,
    state: bool,
) -> None:
    """Loads the rows of a part that the files have in other columns: put together, then cut."""
    table = part.piece.table
    for start, stop in info.tables[table].blocks():
        start, stop = max(start, part.row_start), min(stop, part.row_stop)
        if start < stop:
            beat()
            values = reader.read(table, start, stop, state=state)
            names = values if state else [WEIGHT]
            store.write(table, start, {name: values[name] for name in names})
            del values  # Not beside the next ones.


def _load_dense_state(
    info: CheckpointInfo, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    parameters = dict(model.named_parameters())
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in info.dense_state().items():
        name, _, state = key.rpartition("/")
        by_parameter.setdefault(name, {})[state] = value
    # All or none: an optimizer may keep no state, or make it in its first step.
    if by_parameter and (missing := parameters.keys() - by_parameter.keys()):
        raise DamagedError(
            f"{info.folder} is damaged: no optimizer state of dense weights "
            + ", ".join(sorted(missing))
        )
    optimizer.state.clear()
    for name, values in by_parameter.items():
        optimizer.state[parameters[name]] = values


def on_all_ranks(comm: Communicator, load: Callable[[], None]) -> None:
    """Runs `load`, which doesn't communicate, and raises on all ranks what one has met."""
    error: UserError | OSError | None = None
    try:
        load()
    except (UserError, OSError) as caught:
        error = caught
    for met in comm.all_gather_object(error):
        if met is not None:
            raise met
