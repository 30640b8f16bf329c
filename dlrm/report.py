"""`report.html` of a run folder: one self-contained page with its results, curves and settings.

The page opens from disk, loads nothing, and depends on nothing but the files of the run: equal
files give equal bytes (with one release of matplotlib). What a run lacks, because it failed or
wasn't evaluated, is named in the page in a plain sentence and is never an error.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.style
import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

FloatArray = npt.NDArray[np.float64]

# More points than this can't be told apart on the page, and only make it larger.
MAX_POINTS = 600

BLUE, ORANGE, GREY = "#2f6690", "#c8702a", "#8a9197"
# In the order of a training step; waiting for data stands out.
PHASE_COLOURS = {
    "data_wait": "#b5483f",
    "plan": "#dba63f",
    "lookup": "#2f6690",
    "forward": "#6ba3bf",
    "backward": "#7d6fa6",
    "apply": "#4f8a5b",
    "dense_update": "#a9c79a",
}
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
WIDE_INCHES, HALF_INCHES = (9.6, 3.0), (4.7, 3.4)


@dataclass(frozen=True)
class Plot:
    """One plot of the page: `svg`, or the `note` that says why there is none."""

    title: str
    svg: Markup | None = None
    note: str = ""
    is_wide: bool = False


@dataclass(frozen=True)
class FigureTable:
    """A table of names and values, or a `note` where none of the values was recorded."""

    title: str
    rows: list[tuple[str, str]]
    note: str = ""


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
    missing or damaged. The report appears whole or not at all.

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
    report, unfinished = run_dir / "report.html", run_dir / f".report.html.{os.getpid()}"
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
        run.notes.append(f"Damaged lines of metrics.jsonl that are left out: {num_damaged}.")
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
    name = _at(run.result, "data.name")
    figures, where = _eval_figures(run)
    return environment.get_template("report.html.j2").render(
        data_name="data not recorded" if name in (MISSING, None) else str(name),
        status="no result recorded" if status is None else str(status),
        is_completed=status == "completed",
        synthetic=_synthetic_sentence(run, figures),
        notes=[*run.notes, *_loss_notes(run)],
        headline=_rows(figures, HEADLINE),
        headline_of=where,
        tables=_tables(run),
        plots=_plots(run),
        config_yaml=run.config_yaml,
    )


# --- reading ------------------------------------------------------------------------------------


class _Missing:
    """Stands for a value that a file doesn't have, while None is one that is undefined."""


MISSING = _Missing()


def _read_text(path: Path, notes: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        notes.append(f"The run has no {path.name}.")
    except (OSError, UnicodeDecodeError) as error:
        notes.append(f"{path.name} could not be read: {error}.")
    return None


def _read_mapping(path: Path, notes: list[str]) -> Mapping[str, Any]:
    text = _read_text(path, notes)
    value = None if text is None else _parsed(text)
    if isinstance(value, Mapping):
        return value
    if text is not None:
        notes.append(f"{path.name} is damaged and is left out.")
    return {}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return MISSING


def _at(source: Any, path: str) -> Any:
    """The value at a dotted path, or `MISSING`."""
    for key in path.split("."):
        if not isinstance(source, Mapping) or key not in source:
            return MISSING
        source = source[key]
    return source


def _number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None


def _points(items: Iterable[Any], *keys: str | int) -> FloatArray:
    """The values at `keys` of those items that have a finite number at each, `(items, keys)`."""
    rows = []
    for item in items if isinstance(items, Sequence) else []:
        try:
            row = [_number(item[key]) for key in keys]
        except (TypeError, KeyError, IndexError):
            continue
        if None not in row:
            rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(-1, len(keys))


# --- tables -------------------------------------------------------------------------------------


def _fixed(value: float) -> str:
    return f"{value:.4f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _short(value: float) -> str:
    return f"{value:,.4g}"


def _nats(value: float) -> str:
    return f"{value:.4f} nats"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"


_RowSpec = tuple[str, str, Callable[[float], str]]

HEADLINE: tuple[_RowSpec, ...] = (
    ("AUC", "auc", _fixed),
    ("log loss (nats)", "logloss", _fixed),
    ("normalised entropy", "ne", _fixed),
    ("calibration", "calibration", _fixed),
    ("samples", "num_samples", _whole),
)
TRAINING: tuple[_RowSpec, ...] = (
    ("steps", "steps", _whole),
    ("samples", "samples", _whole),
    ("epochs", "epochs", _short),
    ("last training loss", "loss_last", _nats),
    ("samples per second", "samples_per_s", _whole),
    ("step time, median", "step_ms_p50", _ms),
    ("step time, 90th percentile", "step_ms_p90", _ms),
    ("share of time waiting for data", "data_wait_share", _percent),
)
MEMORY: tuple[_RowSpec, ...] = (
    ("ranks", "world_size", _whole),
    ("peak resident memory, largest rank", "memory.peak_rss_bytes_max_rank", _bytes),
    ("embedding tables, largest rank", "memory.table_bytes_max_rank", _bytes),
    ("optimizer state, largest rank", "memory.state_bytes_max_rank", _bytes),
)
COMMUNICATION: tuple[_RowSpec, ...] = (
    ("collectives for the tables", "collectives_per_step", _short),
    ("collectives for dense weights", "dense_collectives_per_step", _short),
    ("ids sent", "bytes_sent_per_step.ids", _bytes),
    ("rows sent", "bytes_sent_per_step.rows", _bytes),
    ("gradients sent", "bytes_sent_per_step.grads", _bytes),
    ("dense gradients sent", "bytes_sent_per_step.dense", _bytes),
    ("imbalance over ranks", "imbalance", _short),
)
DATA: tuple[_RowSpec, ...] = (
    ("name", "name", str),
    ("synthetic", "synthetic", str),
    ("best reachable AUC", "best_auc", _fixed),
    ("best reachable log loss", "best_logloss", _nats),
)
IDENTITY: tuple[_RowSpec, ...] = (
    ("seed", "seed", _short),
    ("configuration", "config_digest", str),
    ("plan", "plan_digest", str),
    ("data", "data.digest", str),
    ("model", "model_digest", str),
)


def _tables(run: RunFiles) -> list[FigureTable]:
    result = run.result
    data = _table("Data", _at(result, "data"), DATA)
    if unknown := _unknown_ids(run):
        data.rows.append(("ids unknown to the vocabulary", unknown))
    train, title = _at(result, "train"), "Training"
    if not isinstance(train, Mapping) and run.train_lines:
        train, title = _logged_training(run), "Training, as far as it was logged"
    versions = _at(result, "versions")
    names = versions if isinstance(versions, Mapping) else ()
    return [
        _table(title, train, TRAINING),
        data,
        _table("Memory", result, MEMORY),
        _table("Communication per step", _at(result, "comm"), COMMUNICATION),
        FigureTable(
            "Versions", [(str(name), str(versions[name])) for name in names], "Not recorded."
        ),
        _table("Seed and digests", result, IDENTITY),
    ]


def _table(title: str, source: Any, spec: Iterable[_RowSpec]) -> FigureTable:
    rows = [row for row in _rows(source, spec) if row[1] != NOT_RECORDED]
    return FigureTable(title, rows, "Not recorded.")


NOT_RECORDED = "not recorded"


def _rows(source: Any, spec: Iterable[_RowSpec]) -> list[tuple[str, str]]:
    return [(name, _shown(_at(source, path), form)) for name, path, form in spec]


def _shown(value: Any, form: Callable[[float], str]) -> str:
    if value is MISSING:
        return NOT_RECORDED
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and {"mean", "max"} <= value.keys():
        return f"{_shown(value['mean'], form)} (largest rank {_shown(value['max'], form)})"
    return str(value) if isinstance(value, str) or _number(value) is None else form(value)


def _eval_figures(run: RunFiles) -> tuple[Mapping[str, Any], str]:
    """The final evaluation, or else the latest one on the way, and the words for which it is."""
    final = run.result.get("eval")
    if isinstance(final, Mapping):
        split = run.evaluation.get("split")
        return final, "Final evaluation" + (f" on the {split} split" if split else "")
    if run.history:
        last = run.history[-1]
        return last, f"Latest evaluation, at step {last.get('step', 'unknown')}"
    return {}, "This run has not been evaluated"


def _logged_training(run: RunFiles) -> dict[str, Any]:
    last = run.train_lines[-1]
    figures = {"steps": "step", "samples": "samples", "loss_last": "loss"}
    train = {ours: last[logged] for ours, logged in figures.items() if logged in last}
    step_ms = _points(run.train_lines, "step_ms")[:, 0]
    if step_ms.size:
        train["step_ms_p50"], train["step_ms_p90"] = np.percentile(step_ms, [50, 90]).tolist()
    if (speed := _points(run.train_lines, "samples_per_s")[:, 0]).size:
        train["samples_per_s"] = float(np.median(speed))
    wait_ms = _points(run.train_lines, "data_wait_ms", "step_ms")
    if wait_ms[:, 1].sum() > 0:
        train["data_wait_share"] = float(wait_ms[:, 0].sum() / wait_ms[:, 1].sum())
    return train


def _unknown_ids(run: RunFiles, num_shown: int = 4) -> str:
    shares = _at(run.result, "data.unknown_id_share")
    numbers = {name: _number(share) for name, share in shares.items()} if _is(shares) else {}
    ranked = sorted(
        ((share, name) for name, share in numbers.items() if share is not None),
        key=lambda pair: (-pair[0], pair[1]),
    )
    text = ", ".join(f"{name} {_percent(share)}" for share, name in ranked[:num_shown])
    if len(ranked) > num_shown:
        text += f"; the other {len(ranked) - num_shown} at most {_percent(ranked[num_shown][0])}"
    return text


def _is(value: Any) -> bool:
    return isinstance(value, Mapping)


def _synthetic_sentence(run: RunFiles, figures: Mapping[str, Any]) -> str:
    """What a reader of figures on generated data must know; empty for real data."""
    if _at(run.result, "data.synthetic") is not True:
        return ""
    parts = ["Synthetic data: these figures say nothing about real traffic."]
    for name, key in (("AUC", "auc"), ("log loss", "logloss")):
        best, ours = _number(_at(run.result, f"data.best_{key}")), _number(figures.get(key))
        if best is None:
            parts.append(f"The best reachable {name} is not recorded.")
        elif ours is None:
            parts.append(f"Best reachable {name} {best:.4f}.")
        else:
            parts.append(f"Best reachable {name} {best:.4f}, this model {ours:.4f}.")
    return " ".join(parts)


def _loss_notes(run: RunFiles) -> list[str]:
    bad = [line for line in run.train_lines if "loss" in line and _number(line["loss"]) is None]
    if not bad:
        return []
    first = bad[0].get("step", "unknown")
    return [f"Logged losses that are not finite: {len(bad)}, the first at step {first}."]


# --- plots --------------------------------------------------------------------------------------


def _plots(run: RunFiles) -> list[Plot]:
    best_auc = _number(_at(run.result, "data.best_auc"))
    return [
        _loss_plot(run),
        _history_plot(run, "auc", "AUC", best_auc),
        _history_plot(run, "ne", "Normalised entropy", _best_ne(run)),
        _phases_plot(run),
        _calibration_plot(run),
        _roc_plot(run),
    ]


def _loss_plot(run: RunFiles) -> Plot:
    title = "Training loss"
    logged = _points(run.train_lines, "samples", "loss")
    if not len(logged):
        return Plot(title, note="No training loss was logged.", is_wide=True)
    window = max(1, len(logged) // 20)
    evaluated = _points(run.history, "samples", "logloss")
    best = _number(_at(run.result, "data.best_logloss"))

    def draw(axes: Axes) -> None:
        thin = _thinned(logged)
        axes.plot(*thin.T, color=BLUE, alpha=0.35, linewidth=0.9, label="logged")
        if window > 1:
            mean = np.column_stack([logged[:, 0], _running_mean(logged[:, 1], window)])
            label = f"mean of the last {window} logged"
            axes.plot(*_thinned(mean).T, color=BLUE, label=label)
        if len(evaluated):
            axes.plot(*evaluated.T, "o-", color=ORANGE, markersize=4, label="evaluation")
        _draw_best(axes, best)
        axes.set_ylabel("log loss (nats)")
        _label_samples(axes)
        axes.legend(loc="upper right", ncols=2)

    return Plot(title, _svg("loss", title, draw, WIDE_INCHES), is_wide=True)


def _history_plot(run: RunFiles, key: str, title: str, best: float | None) -> Plot:
    evaluated = _points(run.history, "samples", key)
    if not len(evaluated):
        return Plot(title, note=f"No evaluation with a defined {title} was recorded.")

    def draw(axes: Axes) -> None:
        axes.plot(*evaluated.T, "o-", color=ORANGE, markersize=4, label="evaluation")
        _draw_best(axes, best)
        axes.set_ylabel(title)
        _label_samples(axes)
        if best is not None:
            axes.legend(loc="best")

    return Plot(title, _svg(key, title, draw, HALF_INCHES))


def _phases_plot(run: RunFiles) -> Plot:
    title = "Where the time of a step goes"
    lines = [line for line in run.train_lines if isinstance(line.get("phase_ms"), Mapping)]
    found = {name for line in lines for name in line["phase_ms"]} - set(PHASES_LEFT_OUT)
    names = [*(n for n in PHASE_COLOURS if n in found), *sorted(found - PHASE_COLOURS.keys())]
    samples = np.array([_number(line.get("samples")) or 0.0 for line in lines])
    phase_ms = np.array(
        [[_number(line["phase_ms"].get(name)) or 0.0 for name in names] for line in lines]
    ).reshape(len(lines), len(names))
    timed = phase_ms.sum(axis=1) > 0
    if not timed.any():
        return Plot(title, note="No times of the phases of a step were logged.", is_wide=True)
    samples, phase_ms = samples[timed], phase_ms[timed]
    shares = phase_ms / phase_ms.sum(axis=1, keepdims=True)
    mean_ms = phase_ms.mean(axis=0)

    def draw(axes: Axes) -> None:
        thin = _thinned(np.column_stack([samples, shares]))
        if len(thin) == 1:
            thin = np.repeat(thin, 2, axis=0)
            thin[0, 0] = 0.0
        others = [n for n in names if n not in PHASE_COLOURS]
        greys = dict(zip(others, np.linspace(0.55, 0.8, len(others)).astype(str), strict=True))
        labels = [
            f"{name.replace('_', ' ')}  {_ms(ms)}, {100 * ms / mean_ms.sum():.0f} %"
            for name, ms in zip(names, mean_ms.tolist(), strict=True)
        ]
        colours = [(PHASE_COLOURS | greys)[name] for name in names]
        axes.stackplot(thin[:, 0], thin[:, 1:].T, labels=labels, colors=colours, linewidth=0)
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of the step's time")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(x=0)
        _label_samples(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)

    return Plot(title, _svg("phases", title, draw, WIDE_INCHES), is_wide=True)


def _calibration_plot(run: RunFiles) -> Plot:
    title = "Calibration"
    bins = _points(run.evaluation.get("calibration_curve") or [], 0, 1)
    if not len(bins):
        return Plot(title, note="No calibration curve was recorded.")
    limit = float(bins.max()) * 1.08 or 1.0

    def draw(axes: Axes) -> None:
        axes.plot([0, limit], [0, limit], "--", color=GREY, linewidth=1, label="exact")
        axes.plot(*bins.T, "o-", color=BLUE, markersize=4, label="bins of equal weight")
        axes.set(xlim=(0, limit), ylim=(0, limit))
        axes.set(xlabel="mean prediction of the bin", ylabel="observed rate of positives")
        axes.legend(loc="upper left")

    return Plot(title, _svg("calibration", title, draw, HALF_INCHES))


def _roc_plot(run: RunFiles) -> Plot:
    title = "ROC curve"
    curve = _points(run.evaluation.get("roc_curve") or [], 0, 1)
    if not len(curve):
        return Plot(title, note="No ROC curve was recorded; one class alone has none.")
    auc = _number(_at(run.result, "eval.auc"))

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="chance")
        axes.plot(*curve.T, color=BLUE, label="model" if auc is None else f"model, AUC {auc:.4f}")
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        axes.legend(loc="lower right")

    return Plot(title, _svg("roc", title, draw, HALF_INCHES))


def _best_ne(run: RunFiles) -> float | None:
    """The teacher's log loss over the entropy of the evaluated samples, which is logloss / ne."""
    best = _number(_at(run.result, "data.best_logloss"))
    evaluated = _points(run.history, "logloss", "ne")
    if best is None or not len(evaluated) or evaluated[-1].min() <= 0:
        return None
    logloss, ne = evaluated[-1].tolist()
    return best * ne / logloss


def _draw_best(axes: Axes, best: float | None) -> None:
    if best is not None:
        label = f"best reachable, {best:.4f}"
        axes.axhline(best, color=GREY, linestyle="--", linewidth=1.1, label=label)


def _label_samples(axes: Axes) -> None:
    axes.set_xlabel("training samples")
    axes.xaxis.set_major_formatter(EngFormatter())


def _thinned(points: FloatArray) -> FloatArray:
    """Means over runs of neighbours, so that at most `MAX_POINTS` rows are left."""
    if len(points) <= MAX_POINTS:
        return points
    starts = np.linspace(0, len(points), MAX_POINTS, endpoint=False).astype(np.int64)
    counts = np.diff(starts, append=len(points))
    return np.add.reduceat(points, starts, axis=0) / counts[:, None]


def _running_mean(values: FloatArray, window: int) -> FloatArray:
    """The mean of each value and the up to `window - 1` before it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(end - window, 0)
    return (total[end] - total[begin]) / (end - begin)


def _svg(
    name: str, title: str, draw: Callable[[Axes], None], size_inches: tuple[float, float]
) -> Markup:
    """An SVG element for use within a page: the same bytes for the same drawing.

    Its ids are made unique with `name`, since all plots share the ids of one page.
    """
    out = io.StringIO()
    with matplotlib.style.context(["default", STYLE, {"svg.hashsalt": name}]):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure.add_subplot())
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    root, _, body = out.getvalue().partition("<svg ")[2].partition(">")
    view_box = re.search(r'viewBox="[^"]*"', root)
    assert view_box is not None, "matplotlib's SVG has a viewBox"
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    return Markup(f'<svg role="img" aria-label="{escape(title)}" {view_box[0]}>{body}')
