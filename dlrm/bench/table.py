"""The table of a comparison, at most 100 columns wide."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.table import Column, Table

from dlrm.bench.comparison import Comparison, Variant, VariantSummary
from dlrm.bench.ratios import Spread

MAX_WIDTH = 100
_MAX_RATIO_COLUMNS = 2


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Prints a row per side and precision, and below notes, claims and problems."""
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
    for line in [*comparison.notes, *comparison.claims(), *comparison.problems]:
        text = line if "\n" in line else wrapped(line, "    ", console.width)
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def wrapped(text: str, indent: str, width: int = MAX_WIDTH) -> str:
    """Text in lines of at most `width` columns, those after the first indented."""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def ratio_text(ratio: Spread) -> str:
    """`1.31 (1.25-1.40)`; three digits, so that the table keeps its width."""
    return ratio.text(2 if ratio.greatest < 10 else 1 if ratio.greatest < 100 else 0)


def _ratio_columns(comparison: Comparison) -> list[str]:
    """What has a column of ratios: variants of this system, all or the first of many; or sides of
    it, where each group of rows has its own variant of them."""
    apart = comparison.yardstick.grouped_by != "precision"
    names = list(dict.fromkeys(own.side if apart else own.name for own in comparison.own()))
    return names if len(names) <= _MAX_RATIO_COLUMNS else names[:1]


def _ratio_to(comparison: Comparison, variant: VariantSummary, column: str) -> Spread | None:
    apart = comparison.yardstick.grouped_by != "precision"
    return variant.ratio_to.get(Variant(column, variant.precision).name if apart else column)


def _columns(comparison: Comparison) -> list[Column]:
    yardstick = comparison.yardstick
    more = [column.header for column in yardstick.columns if column.header is not None]
    names = [yardstick.main.header or "", *(f"/ {n}" for n in _ratio_columns(comparison)), *more]
    return [Column("side"), *(Column(name, justify="right") for name in names)]


def _cells(comparison: Comparison, variant: VariantSummary) -> list[str]:
    yardstick = comparison.yardstick
    cells = [f"  {variant.side}" if variant.precision else variant.side]
    if variant.main is None:
        return [*cells, "failed"]
    cells.append(yardstick.main.spread_text(variant.main))
    for own in _ratio_columns(comparison):
        ratio = _ratio_to(comparison, variant, own)
        cells.append("" if ratio is None else ratio_text(ratio))
    for column in yardstick.columns:
        if column.header is not None:
            value = variant.columns[column.name]
            cells.append("" if value is None else column.text(value))
    return cells
