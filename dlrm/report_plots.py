"""The plots of `report.html` and `sweep.html`: inline SVG, the same bytes for the same numbers.

Every function takes finite numbers, at least one row of them, and knows nothing of run folders.
matplotlib is used through its objects only: no pyplot, so no state is shared with the caller, and
the user's matplotlibrc has no say.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib.style
import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

FloatArray = npt.NDArray[np.float64]
Spans = Sequence[tuple[str, float, float]]
"""`(name, start, length)`."""

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
    "dense_reduce": "#b59ac4",
    "apply": "#4f8a5b",
    "dense_update": "#a9c79a",
}

# Of the operators in the timeline of a profiled step, the one that takes longest first.
OPERATOR_COLOURS = ("#c8702a", "#2f6690", "#4f8a5b", "#7d6fa6", "#dba63f", "#6ba3bf")
LIGHT_GREY = "#c9cdd1"

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
    "legend.fancybox": False,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.6,
}
WIDE_INCHES, HALF_INCHES = (9.6, 3.0), (4.7, 3.4)


def loss(logged: FloatArray, evaluated: FloatArray, best: float | None) -> Markup:
    """Training loss, logged and smoothed, and the log loss of evaluations.

    Args:
        logged: `(samples, loss)` of each logged step.
        evaluated: `(samples, log loss)` of each evaluation; may have no rows.
        best: the log loss of the teacher of synthetic data.
    """
    window = max(1, len(logged) // 40)

    def draw(axes: Axes) -> None:
        axes.plot(*_thinned(logged).T, color=BLUE, alpha=0.35, linewidth=0.9, label="logged")
        if window > 1:
            smoothed = np.column_stack([_running_mean(column, window) for column in logged.T])
            label = f"mean of {window} neighbours"
            axes.plot(*_thinned(smoothed).T, color=BLUE, label=label)
        if len(evaluated):
            axes.plot(*evaluated.T, "o-", color=ORANGE, markersize=4, label="evaluation")
        _draw_best(axes, best)
        axes.set_ylabel("log loss (nats)")
        _label_samples(axes)
        axes.legend(loc="upper right", ncols=2)

    return _svg("loss", "Training loss over training samples", draw, WIDE_INCHES)


def history(metric: str, evaluated: FloatArray, best: float | None) -> Markup:
    """A metric over training: `(samples, value)` of each evaluation, and the teacher's value."""

    def draw(axes: Axes) -> None:
        axes.plot(*evaluated.T, "o-", color=ORANGE, markersize=4, label="evaluation")
        _draw_best(axes, best)
        axes.set_ylabel(metric)
        _label_samples(axes)
        if best is not None:
            axes.legend(loc="best")

    title = f"{metric} of the evaluations over training samples"
    return _svg(metric.replace(" ", "-"), title, draw, HALF_INCHES)


def phases(samples: FloatArray, names: list[str], phase_ms: FloatArray) -> Markup:
    """The shares of a step's phases, stacked over training, with their mean times.

    Args:
        samples: training samples at each logged step.
        names: the phases, the lowest first.
        phase_ms: `(logged steps, phases)`; no row is all 0.
    """
    mean_ms = phase_ms.mean(axis=0)
    labels = [
        f"{name.replace('_', ' ')}: {ms:,.1f} ms, {100 * ms / mean_ms.sum():.0f} %"
        for name, ms in zip(names, mean_ms.tolist(), strict=True)
    ]
    others = [name for name in names if name not in PHASE_COLOURS]
    greys = dict(zip(others, np.linspace(0.55, 0.8, len(others)).astype(str), strict=True))
    shares = phase_ms / phase_ms.sum(axis=1, keepdims=True)
    drawn = _thinned(np.column_stack([samples, shares]))
    if len(drawn) == 1:  # one logged step stands for all before it
        drawn = np.repeat(drawn, 2, axis=0)
        drawn[0, 0] = 0.0

    def draw(axes: Axes) -> None:
        colours = [(PHASE_COLOURS | greys)[name] for name in names]
        axes.stackplot(drawn[:, 0], drawn[:, 1:].T, labels=labels, colors=colours, linewidth=0)
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of the step's time")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(x=0)
        _label_samples(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)

    return _svg("phases", "Shares of the phases of a step", draw, WIDE_INCHES)


def in_step_order(names: Iterable[str]) -> list[str]:
    """Phases in the order of a training step, unknown ones last."""
    found = set(names)
    known = [name for name in PHASE_COLOURS if name in found]
    return [*known, *sorted(found - PHASE_COLOURS.keys())]


def calibration(bins: FloatArray) -> Markup:
    """Predicted against observed rate: `(mean prediction, share of positives)` of each bin."""
    limit = float(bins.max()) * 1.08 or 1.0

    def draw(axes: Axes) -> None:
        axes.plot([0, limit], [0, limit], "--", color=GREY, linewidth=1, label="exact")
        axes.plot(*bins.T, "o-", color=BLUE, markersize=4, label="bins of equal weight")
        axes.set(xlim=(0, limit), ylim=(0, limit))
        axes.set(xlabel="mean prediction of the bin", ylabel="observed rate of positives")
        axes.legend(loc="upper left")

    return _svg("calibration", "Calibration curve", draw, HALF_INCHES)


def roc(curve: FloatArray, auc: float | None) -> Markup:
    """The ROC curve: `(false positive rate, true positive rate)` of each threshold."""
    label = "model" if auc is None else f"model, AUC {auc:.4f}"

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="chance")
        axes.plot(*curve.T, color=BLUE, label=label)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        axes.legend(loc="lower right")

    return _svg("roc", "ROC curve", draw, HALF_INCHES)


def bars(title: str, labels: list[str], values: dict[str, list[float]], unit: str) -> Markup:
    """Horizontal bars, the first on top, each stacked of the parts in `values` (`""`: no legend).

    Args:
        title: for readers who can't see it.
        labels: of the bars.
        values: by the name of a part, one number for each bar.
        unit: of the numbers.
    """

    def draw(axes: Axes) -> None:
        left = np.zeros(len(labels))
        rows = np.arange(len(labels))
        for colour, (part, numbers) in zip((BLUE, ORANGE, GREY), values.items(), strict=False):
            axes.barh(rows, numbers, left=left, color=colour, height=0.7, label=part or None)
            left += numbers
        axes.set_yticks(rows, labels)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        if "" not in values:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    name = re.sub(r"[^a-z]+", "-", title.lower())
    return _svg(name, title, draw, (WIDE_INCHES[0], 0.9 + 0.28 * len(labels)))


def timeline(
    step_ms: float,
    phases_at: Spans,
    operators_at: Spans,
    operators: list[str],
    waits_at: Spans,
    in_flight_at: Spans,
) -> Markup:
    """One step of one rank: its phases, its main operators, its waits and what travelled meanwhile.

    Args:
        step_ms: its time; what lies outside is cut off.
        phases_at: `(name, start, ms)` from the step's start on.
        operators_at: likewise.
        operators: their names, which give them their colours.
        waits_at: blocking waits for collectives.
        in_flight_at: collectives from issue to end, a row for each name.
    """
    colours = dict(zip(operators, OPERATOR_COLOURS, strict=False))
    kinds = list(dict.fromkeys(name for name, _, _ in in_flight_at))
    rows: list[tuple[str, Spans, dict[str, str]]] = [
        ("phases", phases_at, PHASE_COLOURS),
        ("operators", operators_at, colours),
    ]
    if waits_at:
        rows.append(("waiting", waits_at, {}))
    for kind in kinds:
        of_kind = [span for span in in_flight_at if span[0] == kind]
        rows.append((f"{kind} under way", of_kind, {kind: BLUE}))

    return _lanes("timeline", "A profiled step", step_ms, rows)


def host_timeline(length_ms: float, phases_at: Spans, queues: Mapping[str, Spans]) -> Markup:
    """Some steps: their phases, and what the queues of the host path did meanwhile.

    Args:
        length_ms: from the first step's start to the last one's end; the rest is cut off.
        phases_at: `(name, start, ms)` from the first step's start on.
        queues: likewise, a row for each.
    """
    rows: list[tuple[str, Spans, dict[str, str]]] = [("steps", phases_at, PHASE_COLOURS)]
    for queue, spans in queues.items():
        names = dict.fromkeys((name for name, _, _ in spans), BLUE)
        rows.append((queue.replace("_", " "), spans, names))
    return _lanes("host-timeline", "Rows on their way", length_ms, rows)


def _lanes(
    name: str, title: str, length_ms: float, rows: list[tuple[str, Spans, dict[str, str]]]
) -> Markup:
    """Rows of spans over one axis of time; those of the first row have their names where they fit.

    Args:
        name: of the picture.
        title: what it shows.
        length_ms: of the axis.
        rows: `(label, spans, colour by name)`.
    """

    def draw(axes: Axes) -> None:
        for number, (_, spans, colour_of) in enumerate(rows):
            axes.broken_barh(
                [(start, ms) for _, start, ms in spans],
                (number - 0.35, 0.7),
                facecolors=[colour_of.get(span, GREY) for span, _, _ in spans],
                linewidth=0,
            )
        for span, start, ms in rows[0][1]:
            if ms > 0.08 * length_ms:
                middle = start + ms / 2
                axes.text(middle, 0, span.replace("_", " "), ha="center", va="center", color="#fff")
        axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
        axes.set(
            xlim=(0, length_ms), ylim=(len(rows) - 0.5, -0.5), xlabel="ms from the step's start"
        )
        axes.grid(visible=False, axis="y")

    return _svg(name, title, draw, (WIDE_INCHES[0], 1.0 + 0.32 * len(rows)))


def times(name: str, ms: dict[str, float], step_ms: float) -> Markup:
    """Bars of the times that a step consists of, the first on top, with their shares.

    Phases, and the first operators, have the colours that they have in `timeline`.

    Args:
        name: of what is shown, in lower case with hyphens.
        ms: by what is shown.
        step_ms: the time of the whole step.
    """
    others = (key for key in ms if not key.startswith("("))
    colours = dict(zip(others, OPERATOR_COLOURS, strict=False)) | PHASE_COLOURS
    labels = [
        f"{key.replace('_', ' ') if key in PHASE_COLOURS else key}: {value:,.2f} ms, "
        f"{100 * value / step_ms:.0f} %"
        for key, value in ms.items()
    ]

    def draw(axes: Axes) -> None:
        rows = np.arange(len(ms))
        bar_colours = [colours.get(key, LIGHT_GREY) for key in ms]
        axes.barh(rows, list(ms.values()), color=bar_colours, height=0.8, alpha=0.45)
        for row, label in enumerate(labels):
            axes.text(0, row, f" {label}", ha="left", va="center", fontsize=8)
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        # The text begins with the bar and may be longer: the longest has room for it.
        axes.set(xlabel="ms per step", xlim=(0, max(ms.values()) * 1.02 or 1.0))

    title = f"Times of the {name.replace('-', ' ')}"
    return _svg(name, title, draw, (HALF_INCHES[0], 0.7 + 0.24 * len(ms)))


def _draw_best(axes: Axes, best: float | None) -> None:
    if best is not None:
        label = f"best reachable, {best:.4f}"
        axes.axhline(best, color=GREY, linestyle="--", linewidth=1.1, label=label)


def _label_samples(axes: Axes) -> None:
    axes.set_xlabel("training samples")
    axes.xaxis.set_major_formatter(EngFormatter())


def _thinned(points: FloatArray) -> FloatArray:
    """Means over groups of neighbours, so that at most `MAX_POINTS` rows are left."""
    if len(points) <= MAX_POINTS:
        return points
    starts = np.linspace(0, len(points), MAX_POINTS, endpoint=False).astype(np.int64)
    counts = np.diff(starts, append=len(points))
    return np.add.reduceat(points, starts, axis=0) / counts[:, None]


def _running_mean(values: FloatArray, window: int) -> FloatArray:
    """Means of every `window` neighbours; `window - 1` fewer than there are values."""
    return np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)


def svg_file(
    name: str,
    draw: Callable[[Axes], None],
    size_inches: tuple[float, float],
    *,
    transparent: bool = False,
) -> str:
    """What `draw` draws, as an SVG file: the same bytes whenever it is drawn."""
    out = io.StringIO()
    with matplotlib.style.context(["default", STYLE, {"svg.hashsalt": name}]):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure.add_subplot())
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=transparent, metadata=no_metadata)
    return out.getvalue()


def _svg(
    name: str, title: str, draw: Callable[[Axes], None], size_inches: tuple[float, float]
) -> Markup:
    """What `draw` draws, as an SVG element for use within a page.

    Its ids are prefixed with `name`, since matplotlib gives the parts of every figure the same ones
    and all plots share one page.
    """
    text = svg_file(name, draw, size_inches, transparent=True)
    root, _, body = text.partition("<svg ")[2].partition(">")
    view_box = re.search(r'viewBox="([^"]*)"', root)
    assert view_box is not None, "matplotlib gives every SVG a viewBox"
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    head = Markup('<svg role="img" aria-label="{}" viewBox="{}">').format(title, view_box[1])
    return head + Markup(body)
