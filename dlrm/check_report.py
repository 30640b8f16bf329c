"""How a check is told: a table for people, figures for result.json, one message where it fails."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dlrm.check_compare import (
    DENSE_GRADIENTS,
    DENSE_STATE,
    DENSE_WEIGHTS,
    GRADIENTS,
    LOSSES,
    MODEL_QUANTITIES,
    POOLED,
    POOLED_GRADIENTS,
    ROWS,
    STATE,
    TABLE_QUANTITIES,
    Differences,
)
from dlrm.check_pass import PassResult
from embeddings.table import TableConfig

WIDTH = 100
_MAX_TABLES = 40
_WORDS = {
    LOSSES: "losses",
    POOLED_GRADIENTS: "gradients of pooled vectors",
    DENSE_GRADIENTS: "dense gradients",
    DENSE_WEIGHTS: "dense weights",
    DENSE_STATE: "dense optimizer state",
}
_COLUMNS = {POOLED: "pooled", GRADIENTS: "gradients", ROWS: "rows", STATE: "state"}


def describe(passes: Sequence[PassResult], tables: Sequence[TableConfig]) -> str:
    """The figures as text of at most 100 columns.

    Args:
        passes: what the passes came to.
        tables: every table.
    """
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    shown = list(tables)
    if len(shown) > _MAX_TABLES:
        shown = sorted(shown, key=lambda table: -_worst_of(table.name, passes))[:_MAX_TABLES]
    console.print(_table_of_tables(passes, shown))
    if len(shown) < len(tables):
        console.print(f"The {_MAX_TABLES} worst of {len(tables)} tables; result.json has all.")
    console.print()
    console.print(_table_of_model(passes))
    console.print()
    for result in passes:
        console.print(_counts(result), soft_wrap=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def vacuous(result: PassResult) -> list[str]:
    """What a pass should have compared and didn't: such a check proves nothing."""
    missing = []
    differences = result.differences
    for quantity in differences.tolerances:
        if quantity == GRADIENTS and result.backend == "fbgemm":
            continue  # Its rows are compared, and it shows no gradients.
        if not result.has_tables and quantity in (*TABLE_QUANTITIES, POOLED_GRADIENTS):
            continue  # The data have no sparse features.
        has_none = quantity in (STATE, DENSE_STATE)  # SGD keeps no state.
        if differences.num_values(quantity) == 0 and not has_none:
            missing.append(quantity.replace("_", " "))
    if differences.num_steps == 0:
        missing.append("steps")
    return missing


def to_json(passes: Sequence[PassResult]) -> dict[str, Any]:
    """The figures of result.json."""
    return {
        "passes": [
            {
                "title": result.title,
                "precision": result.precision,
                "backend": result.backend,
                "wire": result.wire,
                **result.differences.to_json(),
            }
            for result in passes
        ]
    }


def _table_of_tables(passes: Sequence[PassResult], tables: Sequence[TableConfig]) -> Table:
    grid = Table(title="largest differences", title_justify="left", box=None, pad_edge=False)
    grid.add_column("\ntable", overflow="ellipsis", no_wrap=True, max_width=16)
    grid.add_column("\nsize", justify="right", no_wrap=True)
    columns = [
        (result.differences, quantity)
        for result in passes
        for quantity in _COLUMNS
        if quantity in result.differences.tolerances
    ]
    for result in passes:
        quantities = [q for q in _COLUMNS if q in result.differences.tolerances]
        for position, quantity in enumerate(quantities):
            head = _short(result) if position == 0 else ""
            grid.add_column(f"{head}\n{_COLUMNS[quantity]}", justify="right", no_wrap=True)
    for table in tables:
        cells = [_cell(differences, q, table.name) for differences, q in columns]
        grid.add_row(table.name, f"{table.rows:,}×{table.dim}", *cells)
    grid.add_row("", "", *["" for _ in columns])
    grid.add_row("allowed", "", *[f"{d.tolerances[q]:.1e}" for d, q in columns])
    return grid


def _table_of_model(passes: Sequence[PassResult]) -> Table:
    grid = Table(box=None, pad_edge=False)
    grid.add_column("")
    for result in passes:
        grid.add_column(_short(result), justify="right")
        grid.add_column("allowed", justify="right")
    for quantity in MODEL_QUANTITIES:
        cells = []
        for result in passes:
            tolerance = result.differences.tolerances.get(quantity)
            cells.append(_cell(result.differences, quantity))
            cells.append("" if tolerance is None else f"{tolerance:.1e}")
        grid.add_row(_WORDS[quantity], *cells)
    return grid


def _counts(result: PassResult) -> str:
    differences = result.differences
    gradients = differences.num_values(GRADIENTS)
    text = (
        f"{result.title}: {differences.num_steps:,} steps, {differences.num_rows:,} rows, "
        f"{gradients:,} gradient values compared"
    )
    nearest = differences.nearest()
    if nearest is not None:
        text += f"\n  nearest to its limit ({nearest[0]:.2g} of it):\n    {nearest[1]}"
    if differences.num_widened():
        text += (
            f"\n  {differences.num_widened():,} values are allowed more than the table says by "
            f"their conditioning, at most {differences.widest():.2g}"
        )
    return text


def _short(result: PassResult) -> str:
    return result.precision if result.is_end_to_end else f"{result.precision} by step"


def _cell(differences: Differences, quantity: str, name: str | None = None) -> str:
    worst = differences.worst(quantity, name)
    if worst is None:
        return "–"
    mark = "" if differences.worst_share(quantity, name) <= 1 else "!"
    if not math.isfinite(worst):
        return f"{mark}not finite"
    return f"{mark}{worst:.1e}" if worst else "0"


def _worst_of(table: str, passes: Sequence[PassResult]) -> float:
    return max(
        result.differences.worst_share(quantity, table)
        for result in passes
        for quantity in _COLUMNS
    )
