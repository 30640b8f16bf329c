"""`report.html` of a run folder: one self-contained page with its results, curves and settings.

The page opens from disk, loads nothing, and depends on nothing but the files of the run: equal
files give equal bytes (with one release of matplotlib). What a run lacks, because it failed or
wasn't evaluated, is named in the page in a plain sentence and is never an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from data.files import naming
from dlrm import report_plots
from dlrm.host_timeline import HOST_TIMELINE
from dlrm.phases import OTHER, OTHER_SHARE, with_other

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Plot:
    """One plot of the page: an SVG element, or the `note` that says why there is none."""

    title: str
    svg: Markup | None
    note: str
    is_wide: bool = False


@dataclass(frozen=True)
class FigureTable:
    """A table of names and values; without rows where none of the values was recorded."""

    title: str
    rows: list[tuple[str, str]]


@dataclass
class RunFiles:
    """What a run folder holds, as far as it could be read; `notes` says what couldn't be."""

    result: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    timeline: Mapping[str, Any] = field(default_factory=dict)
    host_timeline: Mapping[str, Any] = field(default_factory=dict)
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
        with naming(report):
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
    if "profile" in run.result:
        run.timeline = _read_mapping(run_dir / "profile" / "timeline.json", run.notes)
    if isinstance(run.result.get("host"), Mapping):
        run.host_timeline = _read_mapping(run_dir / HOST_TIMELINE, run.notes)
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
    train, how = _train_figures(run)
    return environment.get_template("report.html.j2").render(
        data_name="data not recorded" if name in (MISSING, None) else str(name),
        status="no result recorded" if status is None else str(status),
        is_completed=status == "completed",
        synthetic=_synthetic_sentence(run, figures),
        notes=[*run.notes, *_loss_notes(run)],
        headlines=[
            FigureTable(where, _rows(figures, EVALUATION)),
            FigureTable(how, _rows({**run.result, **train}, SPEED)),
        ],
        tables=_tables(run, train),
        plots=[*_plots(run), *_host_plots(run), *_profile_plots(run)],
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
        why = ": it hasn't ended, or was ended from outside" if path.name == "result.json" else ""
        notes.append(f"The run has no {path.name}{why}.")
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
    """A number that can be drawn (finite, and no absurd size), or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e100 else None


def _points(items: Any, *keys: str | int) -> FloatArray:
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


NBSP = "\u00a0"  # no line break between a number and its unit


def _fixed(value: float) -> str:
    return f"{value:.4f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _short(value: float) -> str:
    return f"{value:,.4g}"


def _nats(value: float) -> str:
    return f"{value:.4f}{NBSP}nats"


def _ms(value: float) -> str:
    return f"{value:,.1f}{NBSP}ms"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}{NBSP}%"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:,.{0 if unit == 'B' else 1}f}{NBSP}{unit}"
        value /= 1024
    return f"{value:,.2f}{NBSP}GiB"


NOT_RECORDED = "not recorded"

_RowSpec = tuple[str, str, Callable[[float], str]]

EVALUATION: tuple[_RowSpec, ...] = (
    ("AUC", "auc", _fixed),
    ("log loss (nats)", "logloss", _fixed),
    ("normalised entropy", "ne", _fixed),
    ("calibration", "calibration", _fixed),
    ("samples", "num_samples", _whole),
)
SPEED: tuple[_RowSpec, ...] = (
    ("steps", "steps", _whole),
    ("samples per second", "samples_per_s", _whole),
    ("step time, median", "step_ms_p50", _ms),
    ("waiting for data", "data_wait_share", _percent),
    ("peak memory of a rank", "memory.peak_rss_bytes_max_rank", _bytes),
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
HOST: tuple[_RowSpec, ...] = (
    ("mode", "mode", str),
    ("steps that rows are brought ahead", "lookahead", _whole),
    ("hot rows, on every rank", "hot_rows", _whole),
    ("hot rows with their state", "hot_bytes", _bytes),
    ("lookups of hot rows", "row_hit_share", _percent),
    ("expected", "expected_row_hit_share", _percent),
    ("samples with hot rows only", "all_hot_share", _percent),
    ("expected, if features were independent", "expected_all_hot_share", _percent),
    ("cold rows per step", "per_step.cold", _whole),
    ("of these forwarded by an earlier step", "per_step.forwarded", _whole),
    ("written back per step", "per_step.written", _whole),
    ("write-backs avoided per step", "per_step.kept", _whole),
    ("read from host memory per step", "per_step.to_device_bytes", _bytes),
    ("written to host memory per step", "per_step.to_host_bytes", _bytes),
    ("computation waited for rows, per step and rank", "per_step.stall_ms", _ms),
    ("of the rows' way hidden behind computation", "hidden_share", _percent),
    ("hot rows chosen anew", "num_hot_choices", _whole),
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


def _tables(run: RunFiles, train: Mapping[str, Any]) -> list[FigureTable]:
    result = run.result
    data = _table("Data", _at(result, "data"), DATA)
    if unknown := _unknown_ids(run):
        data.rows.append(("ids unknown to the vocabulary", unknown))
    versions = _at(result, "versions")
    named = versions.items() if isinstance(versions, Mapping) else ()
    reasons = _at(result, "plan_reasons")
    placed: list[FigureTable] = []
    # In one process every table is whole, and there is nothing to tell.
    if isinstance(reasons, Mapping) and result.get("world_size") != 1:
        rows = [(str(table), str(reason)) for table, reason in reasons.items()]
        placed = [FigureTable("Plan: where each table lies, and why", rows)]
    has_host = isinstance(result.get("host"), Mapping)
    return [
        _table("Training", train, TRAINING),
        data,
        _table("Memory", result, MEMORY),
        _table("Communication per step and rank", _at(result, "comm"), COMMUNICATION),
        *([_table("Tables in host memory", _at(result, "host"), HOST)] if has_host else []),
        *placed,
        FigureTable("Versions", [(str(name), str(version)) for name, version in named]),
        _table("Seed and digests", result, IDENTITY),
    ]


def _table(title: str, source: Any, spec: Iterable[_RowSpec]) -> FigureTable:
    return FigureTable(title, [row for row in _rows(source, spec) if row[1] != NOT_RECORDED])


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
        return f"{_shown(value['mean'], form)}, max {_shown(value['max'], form)}"
    return str(value) if isinstance(value, str) or _number(value) is None else form(value)


def _eval_figures(run: RunFiles) -> tuple[Mapping[str, Any], str]:
    """The final evaluation, or else the latest one on the way, and the words for it."""
    final = run.result.get("eval")
    if isinstance(final, Mapping):
        split = run.evaluation.get("split")
        return final, "Final evaluation" + (f" on the {split} split" if split else "")
    if run.history:
        last = run.history[-1]
        return last, f"Latest evaluation, at step {last.get('step', 'unknown')}"
    return {}, "This run has not been evaluated"


def _train_figures(run: RunFiles) -> tuple[Mapping[str, Any], str]:
    """The figures of training, or else what its logged lines tell, and the words for it."""
    whole = run.result.get("train")
    if isinstance(whole, Mapping):
        return whole, "Training"
    if not run.train_lines:
        return {}, "Nothing of the training was logged"
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
    return train, "Training, as far as it was logged"


def _unknown_ids(run: RunFiles, num_shown: int = 4) -> str:
    shares = _at(run.result, "data.unknown_id_share")
    if not isinstance(shares, Mapping):
        return ""
    numbers = {str(name): _number(share) for name, share in shares.items()}
    ranked = sorted(
        ((share, name) for name, share in numbers.items() if share is not None),
        key=lambda pair: (-pair[0], pair[1]),
    )
    text = ", ".join(f"{name} {_percent(share)}" for share, name in ranked[:num_shown])
    if len(ranked) > num_shown:
        text += f"; the other {len(ranked) - num_shown} at most {_percent(ranked[num_shown][0])}"
    return text


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
            side = "above" if ours > best else "below"
            gap = f"{abs(ours - best):.4f} {side}"
            parts.append(f"Best reachable {name} {best:.4f}, this model {ours:.4f} ({gap}).")
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
    best_logloss = _number(_at(run.result, "data.best_logloss"))
    logged = _points(run.train_lines, "samples", "loss")
    evaluated = _points(run.history, "samples", "logloss")
    aucs, nes = (_points(run.history, "samples", key) for key in ("auc", "ne"))
    samples, phase_names, phase_ms = _phase_times(run.train_lines)
    bins = _points(run.evaluation.get("calibration_curve"), 0, 1)
    roc = _points(run.evaluation.get("roc_curve"), 0, 1)
    return [
        Plot(
            "Training loss",
            report_plots.loss(logged, evaluated, best_logloss) if len(logged) else None,
            "No training loss was logged.",
            is_wide=True,
        ),
        Plot(
            "AUC",
            report_plots.history("AUC", aucs, best_auc) if len(aucs) else None,
            "No evaluation with a defined AUC was recorded.",
        ),
        Plot(
            "Normalised entropy",
            report_plots.history("normalised entropy", nes, _best_ne(run)) if len(nes) else None,
            "No evaluation with a defined normalised entropy was recorded.",
        ),
        Plot(
            "Where the time of a step goes",
            report_plots.phases(samples, phase_names, phase_ms) if len(samples) else None,
            "No times of the phases of a step were logged.",
            is_wide=True,
        ),
        Plot(
            "Calibration",
            report_plots.calibration(bins) if len(bins) else None,
            "No calibration curve was recorded.",
        ),
        Plot(
            "ROC curve",
            report_plots.roc(roc, _number(_at(run.result, "eval.auc"))) if len(roc) else None,
            "No ROC curve was recorded; one class alone has none.",
        ),
    ]


def _phase_times(lines: Sequence[Mapping[str, Any]]) -> tuple[FloatArray, list[str], FloatArray]:
    """The training lines that have times of phases: samples, names, ms as `(lines, names)`."""
    timed = [line for line in lines if isinstance(line.get("phase_ms"), Mapping)]
    found = {name for line in timed for name in line["phase_ms"]} - {"eval"}
    names = report_plots.in_step_order(found)
    ms = [[_number(line["phase_ms"].get(name)) or 0.0 for name in names] for line in timed]
    samples = np.array([_number(line.get("samples")) or 0.0 for line in timed])
    phase_ms = np.array(ms, dtype=np.float64).reshape(len(timed), len(names))
    held = phase_ms.sum(axis=1) > 0
    samples, phase_ms = samples[held], phase_ms[held]
    step_ms = np.array([_number(line.get("step_ms")) or 0.0 for line in timed])[held]
    rest_ms = (step_ms - phase_ms.sum(axis=1)).clip(min=0.0)
    if OTHER not in names and rest_ms.sum() > OTHER_SHARE * step_ms.sum():
        names, phase_ms = [*names, OTHER], np.column_stack([phase_ms, rest_ms])
    return samples, names, phase_ms


def _host_plots(run: RunFiles) -> list[Plot]:
    """Of a run with tables in host memory: some steps, and what was under way meanwhile."""
    if not isinstance(run.result.get("host"), Mapping):
        return []
    items = run.host_timeline.get("spans")
    of_row: dict[str, list[tuple[str, float, float]]] = {}
    for item in items if isinstance(items, list) else []:
        if isinstance(item, list) and len(item) == 4:
            of_row.setdefault(str(item[0]), []).extend(_spans([item[1:]]))
    length = _number(run.host_timeline.get("length_ms"))
    phases = of_row.pop("compute", [])
    first, num_steps = (_number(run.host_timeline.get(k)) for k in ("first_step", "num_steps"))
    title = "Rows on their way while steps are computed, rank 0"
    if first is not None and num_steps is not None:
        title += f": steps {first:.0f} to {first + num_steps - 1:.0f}"
    return [
        Plot(
            title,
            report_plots.host_timeline(length, phases, of_row)
            if length is not None and length > 0 and phases
            else None,
            "No steps were recorded.",
            is_wide=True,
        )
    ]


def _profile_plots(run: RunFiles) -> list[Plot]:
    """Of a run with `train.profile`: one step as a timeline, and where the time of all went."""
    profile = _at(run.result, "profile")
    if not isinstance(profile, Mapping):
        return []
    step, length = (_number(run.timeline.get(key)) for key in ("step", "step_ms"))
    phases, operators, waits, collectives = (
        _spans(run.timeline.get(key)) for key in ("phases", "operators", "waits", "collectives")
    )
    mean_ms = _number(profile.get("step_ms")) or 0.0
    phase_ms = _positive(profile.get("phase_ms"))
    top = profile.get("operators_top")
    listed = [o for o in top if isinstance(o, Mapping)] if isinstance(top, list) else []
    operator_ms = _positive({str(o.get("name")): o.get("self_ms") for o in listed})
    named = [name for name in operator_ms if not name.startswith("(")]
    has_times = mean_ms > 0
    return [
        Plot(
            "One profiled step of rank 0" + (f": step {step:.0f}" if step is not None else ""),
            report_plots.timeline(length, phases, operators, named, waits, collectives)
            if length is not None and length > 0 and phases
            else None,
            "The timeline of the profiled step could not be read.",
            is_wide=True,
        ),
        Plot(
            "Phases of the profiled steps",
            report_plots.times("profiled-phases", with_other(phase_ms, mean_ms), mean_ms)
            if has_times and phase_ms
            else None,
            "No times of phases were recorded.",
        ),
        Plot(
            "Operators of the profiled steps (own time)",
            report_plots.times("profiled-operators", operator_ms, mean_ms)
            if has_times and operator_ms
            else None,
            "No times of operators were recorded.",
        ),
    ]


def _spans(items: Any) -> list[tuple[str, float, float]]:
    """`(name, start, length)` of those items that have them."""
    named = [
        item
        for item in (items if isinstance(items, list) else [])
        if isinstance(item, list) and len(_points([item], 1, 2))
    ]
    return [(str(item[0]), float(item[1]), float(item[2])) for item in named]


def _positive(values: Any) -> dict[str, float]:
    """The entries of a mapping that are numbers above 0."""
    numbers = values.items() if isinstance(values, Mapping) else ()
    found = {str(name): _number(value) for name, value in numbers}
    return {name: number for name, number in found.items() if number is not None and number > 0}


def _best_ne(run: RunFiles) -> float | None:
    """The teacher's log loss over the entropy of the evaluated samples, which is logloss / ne."""
    best = _number(_at(run.result, "data.best_logloss"))
    evaluated = _points(run.history, "logloss", "ne")
    if best is None or not len(evaluated) or evaluated[-1].min() <= 0:
        return None
    logloss, ne = evaluated[-1].tolist()
    return best * ne / logloss
