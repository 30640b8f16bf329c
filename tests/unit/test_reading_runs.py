"""Reading a run folder that was cut, changed, or whose run goes on and removes what is read."""

from __future__ import annotations

import ast
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from dlrm import score
from dlrm.checkpoint import Checkpoints
from dlrm.metrics import EvalResult
from tests.commands import dlrm, latest, read_result, tiny, without_plots

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
PACKAGE = Path(score.__file__).parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    more = ["train.max_steps=4", "train.checkpoint_every=2"]
    assert dlrm("train", *tiny(tmp_path_factory), *more, f"hydra.run.dir={folder}") == 0
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_plots(monkeypatch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


# ------------------------------------------------------------------------------------- cut files


@pytest.mark.parametrize("share", [0.0, 0.5, 0.97])
@pytest.mark.parametrize("name", ["result.json", "config.yaml", "dataset.json"])
def test_f53_a_cut_file_of_a_run_is_named_in_one_line(
    name: str, share: float, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where what is left of config.yaml is a configuration: that of another model."""
    path = run_dir / name
    content = path.read_bytes()
    cut = content[: int(len(content) * share)]
    path.write_bytes(cut.rpartition(b"\n")[0] if share == 0.97 else cut)
    for verb, more in (("evaluate", []), ("predict", ["data.raw=x.csv"]), ("export", [])):
        assert dlrm(verb, "run=run", *more, f"hydra.run.dir={verb}") == 2
        message = capfd.readouterr().err
        assert f"{path} is damaged" in message
        assert "Traceback" not in message
        assert message.startswith("dlrm: ")


def test_f53_going_on_with_a_run_whose_result_is_cut_names_it(
    run_dir: Path, capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its id can't be compared with that of its checkpoints."""
    (run_dir / "result.json").write_text('{"status": "comp')
    more = ["hydra.run.dir=run", "train.resume=latest", "train.max_steps=4"]
    assert dlrm("train", *tiny(tmp_path_factory), *more) == 2
    assert f"{run_dir / 'result.json'} is damaged" in capfd.readouterr().err
    (run_dir / "result.json").unlink()
    assert dlrm("train", *tiny(tmp_path_factory), *more) == 0


# ------------------------------------------------------------------------------- beside rotation


def rotate_while_it_is_read(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, times: int = 1
) -> list[str]:
    """Once the model is found, the run that goes on names a newer one and removes it."""
    found: list[str] = []
    make_task = score.make_task

    def found_then_gone(*arguments: Any) -> score.ScoreTask:
        task = make_task(*arguments)
        found.append(task.info.folder.name)
        if len(found) <= times:
            newer = f"step-{4 + len(found):06d}"
            root = run_dir / "checkpoints"
            shutil.copytree(task.info.folder, root / newer)
            for name in ("best", "latest"):
                (root / name).write_text(newer)
            shutil.rmtree(task.info.folder)
        return task

    monkeypatch.setattr(score, "make_task", found_then_gone)
    monkeypatch.setattr("dlrm.export.make_task", found_then_gone)
    return found


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_f36_a_model_that_is_rotated_away_while_it_is_read_is_no_damage(
    verb: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = rotate_while_it_is_read(run_dir, monkeypatch)
    assert dlrm(verb, "run=run", "hydra.run.dir=out") == 0
    assert found == ["step-000004", "step-000005"]
    assert "the run that goes on has newer ones" in capfd.readouterr().out
    assert read_result(Path("out"))["status"] == "completed"


def test_f36_a_model_that_is_always_rotated_away_ends_with_the_reason(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rotate_while_it_is_read(run_dir, monkeypatch, times=99)
    assert dlrm("evaluate", "run=run", "hydra.run.dir=out") == 2
    assert "was removed while it was read" in capfd.readouterr().err


def test_f36_damage_is_still_called_so(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = latest(run_dir) / "rows-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert dlrm("evaluate", "run=run", "hydra.run.dir=out") == 2
    assert f"{path} is damaged" in capfd.readouterr().err


def test_f36_a_pointer_that_moves_on_while_it_is_read_is_followed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No warning: nothing is damaged, and the best stays the best, not the latest."""
    named = Checkpoints._named
    root = run_dir / "checkpoints"
    seen: list[str] = []

    def named_then_moved(self: Checkpoints, name: str) -> Path | None:
        folder = named(self, name)
        seen.append(name)
        if len(seen) == 1:
            shutil.move(root / "step-000004", root / "step-000005")
            (root / "best").write_text("step-000005")
        return folder

    monkeypatch.setattr(Checkpoints, "_named", named_then_moved)
    info = Checkpoints(run_dir).find("best")
    assert (info.folder.name, info.which) == ("step-000005", "best")


# ------------------------------------------------------------------------------------- figures


def test_f36_an_infinite_figure_is_null_and_named() -> None:
    """JSON has no infinity; a run whose model is surely wrong somewhere is still written down."""
    result = EvalResult(0.5, math.inf, math.nan, 1.0, 10, 5, 10.0)
    values = result.as_dict()
    assert (values["logloss"], values["ne"], values["calibration"]) == (None, None, 1.0)
    assert values["not_finite"] == {"logloss": "inf", "ne": "nan"}
    assert "not_finite" not in EvalResult(0.5, 0.6, 0.9, 1.0, 10, 5, 10.0).as_dict()


def test_f36_text_files_have_an_encoding() -> None:
    """That of the locale would be ASCII in a container: paths and names are UTF-8 everywhere."""
    without = []
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _is_text_without_encoding(node):
                line = ast.unparse(node)
                if "/proc/" not in line and "/sys/" not in line:
                    without.append(f"{path.name}:{node.lineno}: {line}")
    assert without == []


def _is_text_without_encoding(call: ast.Call) -> bool:
    has_encoding = any(keyword.arg == "encoding" for keyword in call.keywords)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "read_text":
        return not has_encoding and not call.args
    if isinstance(call.func, ast.Attribute) and call.func.attr == "write_text":
        # Of the run folder's own, with a name first, the encoding is its affair.
        return not has_encoding and len(call.args) == 1
    if not (isinstance(call.func, ast.Name) and call.func.id == "open"):
        return False
    mode = call.args[1] if len(call.args) > 1 else ast.Constant("r")
    is_binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
    return not has_encoding and not is_binary
