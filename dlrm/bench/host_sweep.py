"""The sweep of `dlrm bench host`: which mode is predicted to win, by hot budget and link.

Nothing of it is measured: the counts are those of the workload, the rates are suppositions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from dlrm.bench.host_work import HostWorkload, dense_time, hot_bytes
from dlrm.bench.table import MAX_WIDTH, wrapped
from dlrm.config import BenchRun
from dlrm.report_plots import BLUE, GREY, LIGHT_GREY, ORANGE, svg_file
from embeddings.host.cost import STAGED_MODES, HostRates, LinkRates, StepWork, SweepCell, sweep

PICTURE = "host_sweep.svg"
_COLOURS = {"lookahead": BLUE, "hotline": ORANGE, "gather": GREY, "classic": LIGHT_GREY}
_MOST_LINKS = 5
_Rows = list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]
"""Each budget with its cells, link by link."""


def host_sweep(config: BenchRun, workload: HostWorkload) -> dict[str, Any]:
    """Predicted speed-ups over `classic`, for result.json.

    Returns:
        `assumptions` (rates), `text` (the same for people), `budgets` (what is hot and cold under
        each) and `cells`, budget by budget and link by link.
    """
    bench, host = config.bench.host, config.sharding.host
    num_samples = config.data.batch_size
    work_of: dict[int, StepWork] = {}
    for hot_mb in bench.sweep_hot_mb:
        hot = workload.hot_set(hot_bytes(hot_mb), host.whole_rows)
        work_of[hot_bytes(hot_mb)] = workload.count(hot, host.lookahead).work(config, workload)
    links = [LinkRates(gb_s * 1e9, bench.sweep_latency_us / 1e6) for gb_s in bench.sweep_link_gb_s]
    cells = sweep(
        work_of.__getitem__,
        list(work_of),
        links,
        HostRates(bench.sweep_gather_gb_s * 1e9, bench.sweep_scatter_gb_s * 1e9, None),
        dense_time(bench.sweep_dense_ms, bench.fixed_share, num_samples),
        lookahead=host.lookahead,
    )
    return {
        "assumptions": {
            "gather_gb_s": bench.sweep_gather_gb_s,
            "scatter_gb_s": bench.sweep_scatter_gb_s,
            "latency_us": bench.sweep_latency_us,
            "dense_ms": bench.sweep_dense_ms,
            "fixed_share": bench.fixed_share,
            "lookahead": host.lookahead,
            "num_samples": num_samples,
        },
        "text": (
            "Sweep: predicted speed-up over classic (all rows pooled and updated on the host), by "
            "budget of hot rows and link: gather / lookahead / hotline, the fastest with a star "
            "(none: classic is). Counts are this workload's; "
            "rates are assumptions, not measured: gather "
            f"{bench.sweep_gather_gb_s:g} GB/s, scatter {bench.sweep_scatter_gb_s:g} GB/s, dense "
            f"{bench.sweep_dense_ms:g} ms for {num_samples:,} samples, latency "
            f"{bench.sweep_latency_us:g} us, {host.lookahead} step(s) ahead (bench.host.sweep_…)"
        ),
        "budgets": [
            {
                "hot_mb": hot_mb,
                "all_hot_share": work.all_hot_share,
                "num_cold": work.num_cold,
                "num_forwarded": work.num_forwarded,
                "num_unique": work.num_unique,
            }
            for hot_mb, work in zip(bench.sweep_hot_mb, work_of.values(), strict=True)
        ],
        "links_gb_s": list(bench.sweep_link_gb_s),
        "cells": [_cell(config, cell) for cell in cells],
    }


def print_sweep(found: Mapping[str, Any], console: Console | None = None) -> None:
    """A table of winners, at most 100 columns wide; links beyond five in tables of their own."""
    if console is None:
        console = Console()
        console.width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
    console.print()
    console.print(wrapped(found["text"], "    ", console.width), markup=False, highlight=False)
    links = found["links_gb_s"]
    for start in range(0, len(links), _MOST_LINKS):
        shown = range(start, min(start + _MOST_LINKS, len(links)))
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for header in ("hot MiB", "all hot", *(f"{links[link]:g} GB/s" for link in shown)):
            table.add_column(header, justify="right", no_wrap=True)
        for budget, cells in _by_budget(found):
            table.add_row(*_head(budget), *(_speed_ups(cells[link]) for link in shown))
        console.print(table)


def markdown_lines(found: Mapping[str, Any]) -> list[str]:
    """The same for docs/benchmarks.md."""
    headers = ["hot MiB", "all hot", *(f"{link:g} GB/s" for link in found["links_gb_s"])]
    lines = [found["text"], "", f"| {' | '.join(headers)} |", "|" + "---|" * len(headers)]
    for budget, cells in _by_budget(found):
        lines.append(f"| {' | '.join([*_head(budget), *map(_speed_ups, cells)])} |")
    return lines


def picture(found: Mapping[str, Any]) -> str:
    """An SVG: a cell for each budget and link in the winner's colour, with all speed-ups."""
    rows = _by_budget(found)
    names = [name for name in _COLOURS if any(c["winner"] == name for _, cs in rows for c in cs)]
    winner_HL = np.array([[names.index(cell["winner"]) for cell in cells] for _, cells in rows])
    size = (1.4 + 1.7 * winner_HL.shape[1], 1.5 + 0.5 * winner_HL.shape[0])

    def draw(axes: Axes) -> None:
        axes.imshow(
            winner_HL,
            cmap=ListedColormap([_COLOURS[name] for name in names]),
            vmin=-0.5,
            vmax=len(names) - 0.5,
            alpha=_strengths(rows),
            aspect="auto",
        )
        for edge in range(1, winner_HL.shape[0]):
            axes.axhline(edge - 0.5, color="#fff")
        for edge in range(1, winner_HL.shape[1]):
            axes.axvline(edge - 0.5, color="#fff")
        for row, (_, cells) in enumerate(rows):
            for column, cell in enumerate(cells):
                ink = "#3d444b" if cell["winner"] == "classic" else "#fff"
                place: dict[str, Any] = {"ha": "center", "color": ink}
                head, others = _picture_words(cell)
                axes.text(column, row - 0.04, head, va="bottom", fontsize=9, **place)
                axes.text(column, row + 0.04, others, va="top", fontsize=7, **place)
        axes.set_xticks(range(winner_HL.shape[1]), [f"{v:g}" for v in found["links_gb_s"]])
        axes.set_yticks(range(len(rows)), [f"{budget['hot_mb']:g}" for budget, _ in rows])
        axes.set_xlabel("link, GB/s in each direction")
        axes.set_ylabel("hot rows, MiB")
        axes.set_title("Predicted speed-up over classic, the fastest mode above", fontsize=9)
        axes.grid(visible=False)
        handles = [Patch(color=_COLOURS[name], label=name) for name in names]
        assert isinstance(axes.figure, Figure)
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(names))

    return svg_file("host-sweep", draw, size)


def _strengths(rows: _Rows) -> npt.NDArray[np.float64]:
    """How strong each cell's colour is: the more, the larger the speed-up."""
    log_HL = np.log([[cell["speed_up"][cell["winner"]] for cell in cells] for _, cells in rows])
    span = log_HL.max() - log_HL.min()
    return 1.0 - 0.3 * (log_HL.max() - log_HL) / (span or 1.0)


def _picture_words(cell: Mapping[str, Any]) -> tuple[str, str]:
    winner, speed_up = cell["winner"], cell["speed_up"]
    others = [f"{mode} {speed_up[mode]:.2f}" for mode in STAGED_MODES if mode != winner]
    return f"{winner} {speed_up[winner]:.2f} ×", ", ".join(reversed(others))


def _cell(config: BenchRun, cell: SweepCell) -> dict[str, Any]:
    bench = config.bench.host
    hot_mb = next(mb for mb in bench.sweep_hot_mb if hot_bytes(mb) == cell.budget_bytes)
    return {
        "hot_mb": hot_mb,
        "link_gb_s": cell.link.bytes_per_s / 1e9,
        "predicted_ms": {mode: 1e3 * seconds for mode, seconds in cell.predicted_s.items()},
        "speed_up": dict(cell.speed_up),
        "winner": cell.winner,
    }


def _by_budget(found: Mapping[str, Any]) -> _Rows:
    cells = iter(found["cells"])
    num_links = len(found["links_gb_s"])
    return [(budget, list(islice(cells, num_links))) for budget in found["budgets"]]


def _head(budget: Mapping[str, Any]) -> list[str]:
    return [f"{budget['hot_mb']:g}", f"{budget['all_hot_share']:.1%}"]


def _speed_ups(cell: Mapping[str, Any]) -> str:
    """`2.61/3.63*/2.95`."""
    winner, speed_up = cell["winner"], cell["speed_up"]
    return "/".join(
        f"{speed_up[mode]:.{2 if speed_up[mode] < 9.995 else 1}f}{'*' if mode == winner else ''}"
        for mode in STAGED_MODES
    )
