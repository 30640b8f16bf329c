"""The table of a comparison, at most 100 columns wide."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from dlrm.bench.comparison import Comparison, VariantSummary
from dlrm.bench.ratios import Spread

MAX_WIDTH = 100


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Prints a row per side and precision, and below the claims."""
    if console is None:
        console = Console()
        console.width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in _columns(comparison):
        table.add_column(column.header, justify=column.justify, no_wrap=True)
    precision = ""
    for variant in comparison.variants:
        if variant.precision != precision:
            precision = variant.precision
            table.add_row(precision, style="bold")
        table.add_row(*_cells(comparison, variant))
    console.print()
    console.print(table)
    for line in [*comparison.notes(), *comparison.claims(), *comparison.problems]:
        console.print(line, markup=False, highlight=False)


def step_ms_text(step_ms: Spread) -> str:
    """`51.3 (49.8-60.2)`; without decimals from 100 ms on."""
    return step_ms.text(1 if step_ms.greatest < 100 else 0)


def ratio_text(ratio: Spread) -> str:
    """`1.31 (1.25-1.40)`; three digits, so that the table keeps its width."""
    return ratio.text(2 if ratio.greatest < 10 else 1 if ratio.greatest < 100 else 0)


def _columns(comparison: Comparison) -> list[Column]:
    names = ["step ms", *(f"/ {own.name}" for own in comparison.own()), "log loss"]
    if comparison.world_size > 1:
        names.append("MB/step")
    return [Column("side"), *(Column(name, justify="right") for name in names)]


def _cells(comparison: Comparison, variant: VariantSummary) -> list[str]:
    own_names = [own.name for own in comparison.own()]
    if variant.step_ms is None:
        blanks = len(own_names) + (2 if comparison.world_size > 1 else 1)
        return [f"  {variant.side}", "failed", *[""] * blanks]
    cells = [f"  {variant.side}", step_ms_text(variant.step_ms)]
    for own in own_names:
        ratio = variant.ratio_to.get(own)
        cells.append("" if ratio is None else ratio_text(ratio))
    cells.append("" if variant.logloss is None else f"{variant.logloss:.5f}")
    if comparison.world_size > 1:
        cells.append(f"{(variant.sent_bytes or 0.0) / 1e6:.2f}")
    return cells
