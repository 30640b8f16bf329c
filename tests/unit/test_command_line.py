"""What is printed to be typed, and what is typed wrongly: quotes, sweeps, bytes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dlrm.overrides import for_shell, text_override
from tests.commands import dlrm


def read_back(command: str) -> str:
    """The value that a shell and Hydra make of what was printed."""
    (argument,) = shlex.split(command)
    override = OverridesParser.create().parse_override(argument)
    assert not override.is_sweep_override()
    found = OmegaConf.create({override.get_key_element(): override.value()})
    text = found["hydra.run.dir"]
    assert isinstance(text, str)
    return text


_PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1)


@settings(derandomize=True, max_examples=300)
@given(_PATHS)
@example("/tmp/é,=(#&;~'/x")
@example("a b'c\"d\\")
@example("1_1")
@example("null")
@example("${x}")
@example("\\${x}'")
@example("[a")
@example("~/x")
def test_f29_a_printed_path_is_read_back(path: str) -> None:
    assert read_back(for_shell(text_override("hydra.run.dir", path))) == path


@pytest.mark.parametrize("path", ["/tmp/é x/it's", "a;b&c#(d", 'a`b$c!"\\'])
def test_f29_a_real_shell_hands_on_the_same(path: str) -> None:
    """`shlex` is its model only."""
    typed = for_shell(text_override("hydra.run.dir", path))
    out = subprocess.run(["sh", "-c", f"printf %s {typed}"], stdout=subprocess.PIPE, check=True)
    assert out.stdout.decode() == shlex.split(typed)[0]


def test_f29_plain_paths_stay_as_they_are() -> None:
    assert for_shell(text_override("hydra.run.dir", "/runs/a-1.2/b_c")) == (
        "hydra.run.dir=/runs/a-1.2/b_c"
    )


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    status = dlrm(*arguments)
    err = capfd.readouterr().err
    assert status == 2, err
    assert err.startswith("dlrm: "), err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    "value", ["/data/é", "a=b", "(a", "a#b", "a&b", "a;b", "~/a", "it's", "a,b"]
)
def test_f29_an_unquoted_path_is_told_how_to_quote(
    value: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told, typed, is what was meant."""
    monkeypatch.chdir(tmp_path)
    err = refusal(capfd, "train", f"hydra.run.dir={value}")
    assert read_back(err.split("put quotes around it: ")[1].rstrip("\n")) == value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        ("seed=range(5,1)", "no values to try"),
        ("seed=range(0)", "no values to try"),
        ("seed=range(1,5,0)", "must not be zero"),
        ("model=glob(nothing*)", "no values to try"),
        ("seed=range(1000000000)", "more than 10,000"),
        ("seed=range(200) data.batch_size=range(1,200)", "39,800 jobs"),
    ],
)
def test_f46_a_sweep_over_nothing_or_too_much_is_refused(
    swept: str, said: str, capfd: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    err = refusal(capfd, "train", "-m", *swept.split(), "hydra.sweep.dir=sweep")
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_f46_a_job_that_can_t_start_may_have_a_folder_within_folders(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    err = refusal(
        capfd, "train", "-m", "data.batch_size=-1,-2", "hydra.sweep.dir=sweep",
        "hydra.sweep.subdir=of/${hydra.job.num}",
    )  # fmt: skip
    assert "job 0: data.batch_size=-1" in err
    assert "job 1: data.batch_size=-2" in err
    assert (tmp_path / "sweep" / "of" / "1" / "result.json").is_file()


@pytest.mark.parametrize("arguments", [["tr\udcff"], ["train", "data.root='a\udcff'"]])
def test_f46_an_argument_that_is_not_utf8(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    err = refusal(capfd, *arguments)
    assert "\\xff" in err
    assert "not UTF-8" in err
    assert err.count("\n") == 1
