"""`report.html` of a run folder: one self-contained page with its results, curves and settings.

The page opens from disk, loads nothing, and depends on nothing but the files of the run: equal
files give equal bytes (with one matplotlib). What a run doesn't have, because it failed or wasn't
evaluated yet, is named in the page in a plain sentence and is never an error.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.style
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

# More points than this can't be told apart on the page, and only make it larger.
MAX_POINTS = 600

BLUE, ORANGE, GREY = "#2f6690", "#c8702a", "#8a9197"
# In the order of a step (ARCHITECTURE, section 3); waiting for data stands out.
PHASE_COLOURS = {
    "data_wait": "#b5483f",
    "plan": "#dba63f",
    "lookup": "#2f6690",
    "forward": "#6ba3bf",
    "backward": "#7d6fa6",
    "apply": "#4f8a5b",
    "dense_update": "#9dbf8f",
}
# Not part of a training step.
PHASES_LEFT_OUT = ("eval",)

STYLE = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa1a7",
    "axes.labelcolor": "#3d444b",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e4",
    "text.color": "#3d444b",
    "xtick.color": "#5a626a",
    "ytick.color": "#5a626a",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Plot:
    """One plot of the page: `svg`, or the `note` that says why there is none."""

    title: str
    svg: Markup | None = None
    note: str = ""
    wide: bool = False


@dataclass
class RunFiles:
    """What a run folder holds, as far as it could be read; `notes` says what couldn't be."""

    result: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    train_lines: list[Mapping[str, Any]] = field(default_factory=list)
    eval_lines: list[Mapping[str, Any]] = field(default_factory=list)
    config_yaml: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """The evaluations in order, each with `step`, `samples`, `auc`, `logloss`, `ne`."""
        history = self.evaluation.get("history")
        if isinstance(history, list) and history:
            return [point for point in history if isinstance(point, Mapping)]
        return [{**line, **line["eval"]} for line in self.eval_lines]


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into a run folder, in place of an older one.

    Reads `result.json`, `metrics.jsonl`, `evaluation.json` and `config.yaml`, any of which may be
    missing or damaged. The file appears whole or not at all.

    Returns:
        The path of the report.

    Raises:
        ValueError: where `run_dir` is no folder.
        OSError: where the report can't be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is no folder: name the output folder of a run (hydra.run.dir)")
    html = render_report(read_run(run_dir))
    report = run_dir / "report.html"
    unfinished = run_dir / f".report.html.{os.getpid()}"
    try:
        unfinished.write_text(html, encoding="utf-8")
        os.replace(unfinished, report)
    finally:
        unfinished.unlink(missing_ok=True)
    return report


def read_run(run_dir: Path) -> RunFiles:
    """The files of a run folder that a report is made of."""
    run = RunFiles()
    run.result = _read_mapping(run_dir / "result.json", run.notes)
    run.evaluation = _read_mapping(run_dir / "evaluation.json", run.notes)
    run.config_yaml = _read_text(run_dir / "config.yaml", run.notes)
    num_damaged = 0
    for text in (_read_text(run_dir / "metrics.jsonl", run.notes) or "").splitlines():
        line = _parsed(text)
        if not isinstance(line, Mapping):
            num_damaged += 1
        elif isinstance(line.get("eval"), Mapping):
            run.eval_lines.append(line)
        else:
            run.train_lines.append(line)
    if num_damaged:
        run.notes.append(f"metrics.jsonl has {num_damaged} damaged line(s), which are left out.")
    return run


def render_report(run: RunFiles) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    status = run.result.get("status")
    return environment.get_template("report.html.j2").render(
        data_name=_text(run.result, "data", "name"),
        status="no result" if status is None else str(status),
        is_completed=status == "completed",
        synthetic=_synthetic_sentence(run),
        notes=[*run.notes, *_loss_notes(run)],
        figures=_headline(run),
        tables=_tables(run),
        plots=_plots(run),
        config_yaml=run.config_yaml,
    )


# --- tables -------------------------------------------------------------------------------------


def _headline(run: RunFiles) -> list[tuple[str, str]]:
    result = run.result
    return [
        ("AUC", _shown(result, "eval", "auc")),
        ("log loss (nats)", _shown(result, "eval", "logloss")),
        ("normalised entropy", _shown(result, "eval", "ne")),
        ("calibration", _shown(result, "eval", "calibration")),
        ("samples/s", _shown(result, "train", "samples_per_s", form=_whole)),
    ]


def _tables(run: RunFiles) -> list[tuple[str, list[tuple[str, str]]]]:
    result = run.result
    split = run.evaluation.get("split")
    evaluation = [
        ("AUC", _shown(result, "eval", "auc")),
        ("log loss", _shown(result, "eval", "logloss", unit=" nats")),
        ("normalised entropy", _shown(result, "eval", "ne")),
        ("calibration", _shown(result, "eval", "calibration")),
        ("samples", _shown(result, "eval", "num_samples", form=_whole)),
        ("best reachable AUC", _shown(result, "data", "best_auc")),
        ("best reachable log loss", _shown(result, "data", "best_logloss", unit=" nats")),
    ]
    training = [
        ("steps", _shown(result, "train", "steps", form=_whole)),
        ("samples", _shown(result, "train", "samples", form=_whole)),
        ("epochs", _shown(result, "train", "epochs", form="{:g}".format)),
        ("last training loss", _shown(result, "train", "loss_last")),
        ("samples/s", _shown(result, "train", "samples_per_s", form=_whole)),
        ("step time, median", _shown(result, "train", "step_ms_p50", form=_tenth, unit=" ms")),
        ("step time, 90th percentile", _shown(result, "train", "step_ms_p90", form=_tenth, unit=" ms")),
        ("waiting for data", _shown(result, "train", "data_wait_share", form=_percent)),
    ]
    memory = [
        ("peak resident, largest rank", _shown(result, "memory", "peak_rss_bytes_max_rank", form=_bytes)),
        ("tables, largest rank", _shown(result, "memory", "table_bytes_max_rank", form=_bytes)),
        ("optimizer state, largest rank", _shown(result, "memory", "state_bytes_max_rank", form=_bytes)),
    ]
    return []
