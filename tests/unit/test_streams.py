"""What a command prints never ends it: closed streams, pipes that nobody reads, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PRINTS = """
import sys
from dlrm.streams import keep_streams
keep_streams()
for n in range(2000):
    print("a line … and \\udcff")
sys.stdout.flush()
opened = open(sys.argv[1], "w")
print("told", file=sys.stderr)
opened.write(f"descriptor {opened.fileno() > 2}")
"""


def run_it(tmp_path: Path, redirection: str, **environment: str) -> tuple[int, str, str]:
    """(exit status, what it wrote last, stderr) of a program that prints, then works."""
    program = tmp_path / "program.py"
    program.write_text(PRINTS)
    done = tmp_path / "done"
    command = f'"{sys.executable}" "{program}" "{done}" {redirection}'
    out = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **environment},
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    return out.returncode, done.read_text() if done.exists() else "", out.stderr.decode()


@pytest.mark.processes
@pytest.mark.parametrize("redirection", [">&-", "<&- >&-", ">/dev/full", "| head -1 >/dev/null"])
def test_f34_stdout_that_can_t_be_written_ends_nothing(tmp_path: Path, redirection: str) -> None:
    """Nor does a file that is opened later take the place of a closed one."""
    assert run_it(tmp_path, redirection) == (0, "descriptor True", "told\n")


@pytest.mark.processes
def test_f34_closed_stderr_ends_nothing(tmp_path: Path) -> None:
    assert run_it(tmp_path, ">/dev/null 2>&-")[:2] == (0, "descriptor True")


@pytest.mark.processes
def test_f34_ascii_shows_what_it_can_t_write(tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, done, err = run_it(tmp_path, f">{out}", PYTHONIOENCODING="ascii")
    assert (status, done, err) == (0, "descriptor True", "told\n")
    assert out.read_text().startswith(r"a line \u2026 and \udcff")
