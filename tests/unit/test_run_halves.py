"""The runner of the suite: both halves count, and what hangs in one doesn't keep it from ending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PASSES = "def test_it():\n    pass\n"
FAILS = "def test_it():\n    assert False, 'broken on purpose'\n"
# Past any exception that a signal's handler could raise. The child would outlive its parent.
HANGS = """
import subprocess, sys, time
def test_it():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""


def run_halves(
    folder: Path, first: str, second: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs the script over a suite of three files."""
    for name, text in {"unit": first, "dist": second, "recipes": PASSES, "host": PASSES}.items():
        path = folder / "tests" / name / f"test_{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return subprocess.run(
        [sys.executable, CHECKOUT / "scripts" / "run_halves.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_both_halves_count(tmp_path: Path) -> None:
    done = run_halves(tmp_path, PASSES, FAILS)
    assert done.returncode == 1
    assert "all others: passed" in done.stdout
    assert "tests/dist and tests/recipes and tests/host: failed (exit status 1)" in done.stdout
    assert "broken on purpose" in done.stdout
    assert not done.stderr


def test_a_half_that_hangs_tells_where_and_is_killed(tmp_path: Path) -> None:
    """`capture_output` returns only once nobody holds the output open: the hanging test's child
    is gone, too."""
    done = run_halves(tmp_path, HANGS, PASSES, "--limit-s", "8")
    assert done.returncode == 1
    assert "all others (not done after 8 s: killed): failed (exit status -6)" in done.stdout
    assert 'test_unit.py", line 7 in test_it' in done.stdout
    assert "tests/dist and tests/recipes and tests/host: passed" in done.stdout
