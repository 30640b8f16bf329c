"""Which tests are slow: recorded, not guessed.

`scripts/test --all --record-durations` writes how long each test took, set-up and teardown
included, to `tests/durations.json`. What took longer than `SLOW_S` there gets the mark `slow`,
which the default run leaves out; a test with the mark `smoke` stays in it however long it takes. A
test that isn't recorded yet counts as fast.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "durations.json"
SLOW_S = 1.0
# Shorter ones aren't worth a line.
_RECORDED_S = 0.5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {RECORD.name} after the run"
    )


def pytest_configure(config: pytest.Config) -> None:
    # The workers of a parallel run report to one controller, which has no input of its own.
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks recorded slow tests; the longest files begin first, so none is left for the end."""
    recorded: dict[str, float] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    file_s: dict[Path, float] = defaultdict(float)
    for item in items:
        duration_s = recorded.get(item.nodeid, 0.0)
        file_s[item.path] += duration_s
        if duration_s > SLOW_S and item.get_closest_marker("smoke") is None:
            item.add_marker("slow")
    items.sort(key=lambda item: -file_s[item.path])


class _Recorder:
    """Adds up the phases of each test that passed."""

    def __init__(self) -> None:
        self._test_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._test_s[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        slow_s = {
            test: round(duration_s, 1)
            for test, duration_s in sorted(self._test_s.items())
            if duration_s >= _RECORDED_S
        }
        RECORD.write_text(json.dumps(slow_s, indent=0) + "\n", encoding="utf-8")
