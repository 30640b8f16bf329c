"""Output that nobody can take ends no command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm.config import RUN_CONFIGS
from tests.commands import dlrm

CHECKOUT = Path(__file__).parents[2]
PROGRAM = """
import sys
from dlrm.streams import ready_streams
ready_streams()
for _ in range(2000):
    print("… é " * 20)
sys.stdout.flush()
print("done", file=sys.stderr)
"""


def run(redirections: str, **environment: str) -> tuple[int, str, str]:
    """Runs `PROGRAM` with a shell's redirections: exit status, stdout, stderr."""
    command = f'"$PYTHON" -c "$PROGRAM" {redirections}'
    found = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHON": sys.executable, "PROGRAM": PROGRAM} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize(
    ("redirections", "said"),
    [
        ("| head -1 > /dev/null", "done\n"),
        (">&-", "done\n"),
        ("<&- >&- 2>&-", ""),
        ("2>&-", ""),
        (
            "1< /dev/null",  # As a full disk: what is written is an error.
            "dlrm: standard output falls silent: Bad file descriptor\ndone\n",
        ),
    ],
)
def test_f34_a_program_goes_on_without_its_streams(redirections: str, said: str) -> None:
    status, _, err = run(redirections)
    assert (status, err) == (0, said)


def test_f34_a_terminal_that_knows_ascii_only() -> None:
    status, out, err = run("", PYTHONIOENCODING="ascii")
    assert (status, err) == (0, "done\n")
    assert out.splitlines()[0] == r"\u2026 \xe9 " * 20


def test_f34_what_is_printed_is_as_it_was() -> None:
    status, out, _ = run("", PYTHONIOENCODING="utf-8")
    assert status == 0
    assert out == ("… é " * 20 + "\n") * 2000


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_f34_no_home_directory_is_told_with_the_key(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A user without HOME and without an entry, as in many containers."""
    assert verb in RUN_CONFIGS
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("DLRM_CACHE", raising=False)
    assert dlrm(verb, f"hydra.run.dir={tmp_path / 'run'}") == 2
    err = capfd.readouterr().err
    assert "no home directory is known here: set HOME" in err
    assert "data.cache=" in err
    assert "Traceback" not in err
