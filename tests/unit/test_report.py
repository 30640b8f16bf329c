"""The report: complete for a whole run, plain about what is missing, the same bytes each time."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm.report import RunFiles, read_run, render_report, write_report

ROOT = Path(__file__).parents[2]
PHASES = ["data_wait", "plan", "lookup", "forward", "backward", "apply", "dense_update"]
PLOTS = [
    "Training loss over training samples",
    "AUC of the evaluations over training samples",
    "normalised entropy of the evaluations over training samples",
    "Shares of the phases of a step",
    "Calibration curve",
    "ROC curve",
]


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    phase_ms = {name: 1.0 + i for i, name in enumerate(PHASES)} | {"eval": 500.0}
    line = {
        "step": step,
        "samples": 2048 * step,
        "epoch": 0,
        "loss": 0.45 + 0.2 / step,
        "samples_per_s": 61_000.0,
        "step_ms": 33.1,
        "data_wait_ms": 0.331,
        "lr_dense": 0.001,
        "lr_sparse": 0.05,
        "phase_ms": phase_ms,
    }
    return line | changes


def eval_line(step: int, auc: float | None = 0.75) -> dict[str, Any]:
    figures = {"auc": auc, "logloss": 0.46, "ne": 0.88, "calibration": 1.01, "num_samples": 5000}
    return {"step": step, "samples": 2048 * step, "eval": {"split": "valid", **figures}}


def result() -> dict[str, Any]:
    sent = {"ids": 130_000, "rows": {"mean": 1_300_000, "max": 1_400_000}, "grads": 0, "dense": 9}
    return {
        "status": "completed",
        "world_size": 2,
        "seed": 7,
        "versions": {"torch": "2.13.0+cpu"},
        "config_digest": "c0ffee01",
        "plan_digest": "c0ffee02",
        "model_digest": "c0ffee03",
        "data": {
            "name": "synthetic_small",
            "synthetic": True,
            "digest": "c0ffee04",
            "best_auc": 0.8051,
            "best_logloss": 0.4315,
            "unknown_id_share": {f"C{i}": 0.03 / i for i in range(1, 27)},
        },
        "eval": {
            "auc": 0.7871,
            "logloss": 0.4476,
            "ne": 0.8143,
            "calibration": 1.0074,
            "num_samples": 100_000,
        },
        "train": {
            "steps": 300,
            "samples": 614_400,
            "epochs": 1,
            "loss_last": 0.4512,
            "samples_per_s": 61_240.0,
            "step_ms_p50": 32.9,
            "step_ms_p90": 35.2,
            "data_wait_share": 0.004,
        },
        "comm": {
            "collectives_per_step": 3,
            "dense_collectives_per_step": 1,
            "bytes_sent_per_step": sent,
            "imbalance": 1.08,
        },
        "memory": {
            "peak_rss_bytes_max_rank": 2_600_000_000,
            "table_bytes_max_rank": 1_100_000_000,
            "state_bytes_max_rank": 70_000_000,
        },
    }


def evaluation() -> dict[str, Any]:
    history = [
        {"step": step, "samples": 2048 * step, "auc": auc, "logloss": 0.46, "ne": 0.85}
        for step, auc in ((100, 0.74), (200, 0.77), (300, 0.79))
    ]
    return {
        "split": "test",
        "calibration_curve": [[0.1, 0.11, 50.0], [0.3, 0.28, 50.0]],
        "roc_curve": [[0.0, 0.0], [0.2, 0.6], [1.0, 1.0]],
        "history": history,
    }


def write_run(run_dir: Path) -> Path:
    run_dir.mkdir(exist_ok=True)
    lines = [train_line(step) for step in range(10, 301, 10)] + [eval_line(300)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "result.json").write_text(json.dumps(result()))
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation()))
    (run_dir / "config.yaml").write_text("data:\n  batch_size: 2048  # <global>\n")
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


class Page(HTMLParser):
    """What the tests look at: tags in balance, attributes, and the text."""

    VOID = ("meta", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open_tags == []
        self.text = " ".join(" ".join(self.words).replace("\u00a0", " ").split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] != "style":
            self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]


def test_a_whole_run_is_shown_in_full(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    for expected in (
        "synthetic_small completed",
        "Synthetic data",
        "Best reachable AUC 0.8051, this model 0.7871 (0.0180 below).",
        "Best reachable log loss 0.4315, this model 0.4476 (0.0161 above).",
        "Final evaluation on the test split AUC 0.7871 log loss (nats) 0.4476",
        "normalised entropy 0.8143 calibration 1.0074 samples 100,000",
        "samples per second 61,240 step time, median 32.9 ms waiting for data 0.4 %",
        "step time, 90th percentile 35.2 ms",
        "peak resident memory, largest rank 2.42 GiB",
        "rows sent 1.2 MiB, max 1.3 MiB",
        "C1 3.0 %, C2 1.5 %, C3 1.0 %, C4 0.8 %; the other 22 at most 0.6 %",
        "torch 2.13.0+cpu",
        "data c0ffee04 model c0ffee03",
        "batch_size: 2048 # <global>",
    ):
        assert expected in page.text
    assert page.values("aria-label") == PLOTS
    # The plots' own words, still text in the page's font.
    assert "backward: 5.0 ms, 15 %" in page.text
    assert "other: 5.1 ms, 15 %" in page.text, "what the phases leave of the step isn't shown"
    assert "best reachable, 0.8051" in page.text
    assert "model, AUC 0.7871" in page.text
    assert "not recorded" not in page.text.lower()


def test_evaluation_is_not_a_phase_of_a_step(run_dir: Path) -> None:
    # phase_ms of the fixture holds eval: 500 ms, which would dwarf the rest.
    assert "eval: " not in Page(render_report(read_run(run_dir))).text


def test_the_page_is_self_contained(run_dir: Path) -> None:
    html = write_report(run_dir).read_text(encoding="utf-8")
    page = Page(html)
    tags = {tag for tag, _, _ in page.attributes}
    assert not tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"@import|url\((?!#)|https?:", html)
    assert all(value.startswith("#") for value in page.values("href") + page.values("xlink:href"))


def test_the_plots_do_not_share_ids(run_dir: Path) -> None:
    html = write_report(run_dir).read_text(encoding="utf-8")
    ids = Page(html).values("id")
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(ids)


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    here = write_report(write_run(tmp_path / "a")).read_bytes()
    with matplotlib.rc_context({"font.size": 20.0, "svg.hashsalt": "of the user"}):
        assert write_report(write_run(tmp_path / "b")).read_bytes() == here
        assert matplotlib.rcParams["font.size"] == 20.0

    # Another process, with another order of sets; and no pyplot, which would hold global state.
    program = f"""
import sys
from dlrm.report import write_report
write_report({str(tmp_path / "b")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120)
    assert (tmp_path / "b" / "report.html").read_bytes() == here


@pytest.mark.parametrize(
    ("missing", "note"),
    [
        ("result.json", "The run has no result.json: it hasn't ended, or was ended from outside."),
        ("metrics.jsonl", "No training loss was logged."),
        ("evaluation.json", "No calibration curve was recorded."),
        ("config.yaml", "Effective configuration Not recorded."),
    ],
)
def test_each_missing_file_is_named(run_dir: Path, missing: str, note: str) -> None:
    (run_dir / missing).unlink()
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert f"The run has no {missing}" in page.text
    assert note in page.text


def test_an_empty_folder_gives_a_page_of_notes(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "data not recorded no result recorded" in page.text
    assert "This run has not been evaluated" in page.text
    assert page.values("aria-label") == []


def test_a_failed_run_shows_why_and_how_far_it_came(run_dir: Path) -> None:
    (run_dir / "evaluation.json").unlink()
    failed = {"status": "failed: rank 1: loss is nan at step 290 <script>alert(1)</script>"}
    (run_dir / "result.json").write_text(json.dumps(failed))
    lines = [train_line(step) for step in range(10, 281, 10)]
    lines += [train_line(step, loss=math.nan) for step in (290, 300)]
    lines.insert(10, eval_line(100, auc=0.7123))
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"step": 310, "sam'
    (run_dir / "metrics.jsonl").write_text(text)

    html = write_report(run_dir).read_text(encoding="utf-8")
    page = Page(html)
    assert "failed: rank 1: loss is nan at step 290 <script>alert(1)</script>" in page.text
    assert "<script>" not in html
    assert "Damaged lines of metrics.jsonl that are left out: 1." in page.text
    assert "Logged losses that are not finite: 2, the first at step 290." in page.text
    assert "Latest evaluation, at step 100 AUC 0.7123" in page.text
    assert "Training, as far as it was logged steps 300 samples per second 61,000" in page.text
    assert "step time, median 33.1 ms waiting for data 1.0 %" in page.text
    assert page.values("aria-label") == PLOTS[:4]
    assert "Synthetic data" not in page.text


def test_undefined_figures_are_told_from_missing_ones(run_dir: Path) -> None:
    whole = result()
    whole["eval"] |= {"auc": None, "ne": None}
    del whole["eval"]["calibration"]
    (run_dir / "result.json").write_text(json.dumps(whole))
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation() | {"roc_curve": []}))
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "AUC undefined log loss (nats) 0.4476 normalised entropy undefined" in page.text
    assert "calibration not recorded" in page.text
    assert "Best reachable AUC 0.8051. " in page.text
    assert "No ROC curve was recorded; one class alone has none." in page.text


def test_real_data_has_no_teacher(run_dir: Path) -> None:
    whole = result()
    whole["data"] |= {"name": "criteo_kaggle", "synthetic": False}
    whole["data"] |= {"best_auc": None, "best_logloss": None}
    (run_dir / "result.json").write_text(json.dumps(whole))
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "Synthetic data" not in page.text
    assert "best reachable, " not in page.text


def test_one_logged_step_and_unknown_phases_are_drawn(run_dir: Path) -> None:
    line = train_line(10, step_ms=4.0, phase_ms={"lookup": 3.0, "staging": 1.0})
    (run_dir / "metrics.jsonl").write_text(json.dumps(line))
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "staging: 1.0 ms, 25 %" in page.text
    assert PLOTS[3] in page.values("aria-label")


def test_a_rest_that_is_small_is_not_shown(run_dir: Path) -> None:
    line = train_line(10, step_ms=4.1, phase_ms={"lookup": 3.0, "forward": 1.0})
    (run_dir / "metrics.jsonl").write_text(json.dumps(line))
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "lookup: 3.0 ms, 75 %" in page.text
    assert "other: " not in page.text


def write_profile(run_dir: Path) -> None:
    """A profile of two steps, as a run leaves it."""
    profile = {
        "steps": [10, 11],
        "step_ms": 20.0,
        "phase_ms": {"forward": 6.0, "backward": 12.0, "dense_reduce": 0.0},
        "operators_top": [
            {"name": "aten::mm", "self_ms": 9.0, "calls": 11, "share": 0.45},
            {"name": "(Python, between operators)", "self_ms": 3.0, "calls": 9, "share": 0.15},
        ],
        "traces": ["profile/trace.0.json.gz"],
    }
    timeline = {
        "step": 11,
        "step_ms": 21.0,
        "phases": [["forward", 0.0, 6.0], ["backward", 6.0, 13.0]],
        "operators": [["aten::mm", 1.0, 4.0], ["aten::mm", 7.0, 5.0]],
        "waits": [["grads", 18.0, 1.0]],
        "collectives": [["grads", 15.0, 4.0], ["dense", -1.0, 30.0]],
    }
    (run_dir / "result.json").write_text(json.dumps(result() | {"profile": profile}))
    (run_dir / "profile").mkdir(exist_ok=True)
    (run_dir / "profile" / "timeline.json").write_text(json.dumps(timeline))


def test_a_profile_is_drawn(run_dir: Path) -> None:
    write_profile(run_dir)
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    drawn = ["A profiled step", "Times of the profiled phases", "Times of the profiled operators"]
    assert page.values("aria-label") == [*PLOTS, *drawn]
    assert "One profiled step of rank 0: step 11" in page.text
    assert "grads under way" in page.text
    assert "dense under way" in page.text
    assert "backward: 12.00 ms, 60 %" in page.text
    assert "other: 2.00 ms, 10 %" in page.text
    assert "aten::mm: 9.00 ms, 45 %" in page.text


@pytest.mark.parametrize("damage", ["{", "[]", '{"phases": 3, "step_ms": "long"}', None])
def test_a_damaged_timeline_is_named(run_dir: Path, damage: str | None) -> None:
    write_profile(run_dir)
    path = run_dir / "profile" / "timeline.json"
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "The timeline of the profiled step could not be read." in page.text
    assert "Times of the profiled phases" in page.values("aria-label")


def test_a_long_run_gives_no_larger_page(run_dir: Path) -> None:
    sizes = []
    for num_lines in (5_000, 20_000):
        lines = (json.dumps(train_line(step)) for step in range(1, num_lines + 1))
        (run_dir / "metrics.jsonl").write_text("\n".join(lines))
        sizes.append(write_report(run_dir).stat().st_size)
    assert sizes[1] < 1.1 * sizes[0] < 1_000_000


def test_a_failed_write_leaves_the_old_report(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "report.html").write_text("the old report")
    before = sorted(run_dir.iterdir())

    def refuse(source: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_text() == "the old report"
    assert sorted(run_dir.iterdir()) == before


def test_a_wrong_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no_such_run is no folder.*hydra\.run\.dir"):
        write_report(tmp_path / "no_such_run")


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\xff\xfe", b"null", b"[" * 100_000])
def test_damaged_files_are_left_out(run_dir: Path, content: bytes) -> None:
    for name in ("result.json", "evaluation.json", "metrics.jsonl", "config.yaml"):
        (run_dir / name).write_bytes(content)
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "result.json" in page.text
    assert page.values("aria-label") == []


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [math.nan, math.inf, -math.inf, 1e308, -1.0, 0, 10**400, "text", "$x$", [], {}]
    ),
    st.sampled_from([[[]], [[1]], [None], [{"samples": 1}], {"mean": None, "max": "x"}]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON value."""
    if isinstance(value, dict):
        below = [place for key in value for place in places(value[key], (*path, key))]
    elif isinstance(value, list):
        below = [place for i in range(len(value)) for place in places(value[i], (*path, i))]
    else:
        below = []
    return [path, *below] if path else below


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(st.data())
def test_junk_in_any_place_never_raises(data: st.DataObject) -> None:
    whole: dict[str, Any] = {
        "result": result(),
        "evaluation": evaluation(),
        "train": [train_line(10), train_line(20)],
        "eval": [eval_line(20)],
    }
    for _ in range(data.draw(st.integers(1, 8))):
        path = data.draw(st.sampled_from([place for place in places(whole) if len(place) > 1]))
        parent = whole
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = copy.deepcopy(data.draw(JUNK))
    run = RunFiles(
        result=whole["result"],
        evaluation=whole["evaluation"],
        train_lines=[line for line in whole["train"] if isinstance(line, dict)],
        eval_lines=[
            line
            for line in whole["eval"]
            if isinstance(line, dict) and isinstance(line.get("eval"), dict)
        ],
    )
    assert Page(render_report(run)).text.endswith("Effective configuration Not recorded.")
