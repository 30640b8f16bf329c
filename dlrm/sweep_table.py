"""A sweep as a table: for the terminal, and as a page (`sweep.html`) with two bar charts."""

from __future__ import annotations

from pathlib import Path

import jinja2
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from data.files import write_whole
from dlrm.sweep import FIGURES, NOT_STARTED, NOTE, Figure, Sweep, SweepJob, describe

MAX_WIDTH = 100


def print_table(sweep: Sweep, console: Console | None = None) -> None:
    """Prints all jobs, the fastest marked, and below why the failed ones failed.

    At most `MAX_WIDTH` columns wide; plain where standard output is no terminal.
    """
    if console is None:
        console = Console()
        console.width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
    figures = shown_figures(sweep)
    table = Table(
        Column("\njob", justify="right"),
        Column("\noverrides", overflow="fold"),
        Column("\nstatus"),
        *(Column(f.heading, justify="right", no_wrap=True) for f in figures),
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    keys = sweep.differing()
    for job in sweep.jobs:
        status = status_word(sweep, job)
        style = {"fastest": "bold green", "failed": "red"}.get(status, "")
        overrides = Text("\n".join(describe(job, keys)))
        table.add_row(
            str(job.number), overrides, Text(status, style), *(cell(job, f) for f in figures)
        )
    console.print()
    console.print(table)
    if any(figure.name.endswith("_per_step") for figure in figures):
        console.print(Text(NOTE, "dim"))
    for job in sweep.jobs:
        if status_word(sweep, job) == "failed":
            line = f"job {job.number} failed: {job.reason}"
            if len(line) > console.width:
                line = line[: console.width - 3] + "..."
            console.print(Text(line, "red"))


def write_page(sweep: Sweep) -> Path:
    """Writes `sweep.html` into the sweep's folder; opens from disk and loads nothing."""
    from dlrm import report_plots  # matplotlib, which a refused sweep needn't wait for

    keys, figures = sweep.differing(), shown_figures(sweep)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plots = []
    for title, scale, unit, names in (
        ("Median step time", 1.0, "ms", {"": "step_ms_p50"}),
        (
            "Bytes sent per step and rank",
            2.0**20,
            "MiB",
            {"tables": "table_bytes_sent_per_step", "dense network": "dense_bytes_sent_per_step"},
        ),
    ):
        drawn = [
            job for job in sweep.jobs if all(job.figures.get(n) is not None for n in names.values())
        ]
        if drawn:
            labels = [" ".join([f"{job.number}", *describe(job, keys)]) for job in drawn]
            bars = {
                label: [(job.figures[name] or 0.0) / scale for job in drawn]
                for label, name in names.items()
            }
            plots.append((title, report_plots.bars(title, labels, bars, unit)))
    html = environment.get_template("sweep.html.j2").render(
        name=sweep.folder.absolute().name,
        headings=[figure.heading.replace("\n", " ").strip() for figure in figures],
        rows=[
            (
                job.number,
                ", ".join(describe(job, keys)),
                status_word(sweep, job),
                job.reason if status_word(sweep, job) == "failed" else "",
                [cell(job, figure) for figure in figures],
            )
            for job in sweep.jobs
        ],
        note=NOTE,
        plots=plots,
    )
    path = sweep.folder / "sweep.html"
    write_whole(path, html.encode())
    return path


def shown_figures(sweep: Sweep) -> list[Figure]:
    """The figures that some job has."""
    return [f for f in FIGURES if any(job.figures.get(f.name) is not None for job in sweep.jobs)]


def status_word(sweep: Sweep, job: SweepJob) -> str:
    """`ok`, `fastest`, `failed` or `not started`."""
    if job.is_completed:
        return "fastest" if job is sweep.fastest() else "ok"
    return job.status if job.status == NOT_STARTED else "failed"


def cell(job: SweepJob, figure: Figure) -> str:
    """A figure as shown; `-` where there is none."""
    value = job.figures.get(figure.name)
    return "-" if value is None else figure.show(value)
