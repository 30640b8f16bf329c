"""The command: exit statuses, messages, folders, and what it does without fbgemm."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dlrm.trainer import Trainer
from tests.commands import (
    TINY_MODEL,
    dlrm,
    finish,
    read_metrics,
    read_result,
    start_python,
    tiny,
    without_plots,
    write_adult_csv,
)

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start in an empty folder and skip the plots."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny(tmp_path_factory)


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one message of a command that is refused with status 2."""
    capfd.readouterr()
    status = dlrm(*arguments)
    captured = capfd.readouterr()
    assert status == 2, captured
    assert captured.err.startswith("dlrm: "), captured.err
    assert captured.err.count("dlrm: ") == 1, captured.err
    for internal in ("Traceback", "object_type", "reference_type", "HYDRA_FULL_ERROR"):
        assert internal not in captured.err
    return captured.err


# ----------------------------------------------------------------------------------------- verbs


def test_no_verb_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert dlrm() == 2
    bare = capsys.readouterr().out
    assert dlrm("--help") == 0
    assert capsys.readouterr().out == bare
    for verb in ("prepare", "train", "evaluate", "predict"):
        assert verb in bare
        assert dlrm(verb, "--help") == 0
        text = capsys.readouterr().out
        assert f"dlrm {verb}" in text
        assert "examples" in text


def test_an_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert dlrm("nonsense") == 2
    captured = capsys.readouterr()
    assert "nonsense" in captured.err
    assert "'train'" in captured.err
    assert "Traceback" not in captured.err


def test_effective_values_can_be_printed_without_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert dlrm("train", "--cfg", "job", "optim=adam", "seed=7") == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed.optim.sparse.name == "adam"
    assert printed.seed == 7
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------- the user's mistakes: 2


def test_entries_named_by_the_user_need_no_plus(capfd: pytest.CaptureFixture[str]) -> None:
    """Tables are entries of dictionaries that are empty at first."""
    given = ["sharding.tables.C3.layout=row_wise", "model.table_dims.C1=8", "--cfg", "job"]
    assert dlrm("train", *given) == 0
    shown = OmegaConf.create(capfd.readouterr().out)
    assert shown.sharding.tables.C3.layout == "row_wise"
    assert shown.model.table_dims.C1 == 8


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trian.epochs=2"], ["trian.epochs", "did you mean train.epochs"]),
        (["optim.sparse.lrr=1"], ["optim.sparse.lrr", "did you mean optim.sparse.lr"]),
        (["optim.dense.momentum=0.9"], ["optim.dense.momentum"]),  # B22
        (["+optim.dense.momentum=0.9"], ["optim.dense.momentum", "no such key"]),
        (["optim.dense.lr=abc"], ["optim.dense.lr", "=abc: must be a number"]),
        (["data.batch_size=64.5"], ["data.batch_size", "64.5"]),
        (["data.batch_size=null"], ["data.batch_size"]),
        (["train.overwrite=maybe"], ["train.overwrite", "=maybe: must be true or false"]),
        (["model.top_mlp=10-20"], ["model.top_mlp"]),
        (["model.top_mlp=[10,a]"], ["model.top_mlp[1]", "=a: must be a whole number"]),
        (["train.epochs"], ["'train.epochs'", "key=value"]),
        (["model.top_mlp=[10"], ["'model.top_mlp=[10'"]),
        (["data.root=a=b"], ["'data.root=a=b'", "quotes"]),
        (["data=nope"], ["data/nope", "criteo_kaggle"]),
        (["optim=lamb"], ["optim/lamb", "adagrad"]),
        (["data=base"], ["data.name"]),
        (["train.precision=fp8"], ["train.precision=fp8", "bf16"]),
        (["launch.nproc=0"], ["launch.nproc=0", "at least 1"]),
        (["launch.device=cuda"], ["launch.device=cuda", "launch.device=cpu"]),
        (["train.resume=latest"], ["train.resume=latest"]),
        (["data=criteo_kaggle"], ["data.raw=FILE", "data.root=FOLDER"]),
        (["data=criteo_kaggle", "data.raw=no.tsv"], ["data.raw=no.tsv"]),
        (["data=criteo_kaggle", "data.raw=11"], ["data.raw=11"]),
        (["data=adult", "data.raw=a"], ["data.schema.split.kind"]),
        (["data=criteo_kaggle", "data.raw_train=a"], ["data.schema.split.kind"]),
        (["data.raw=a.tsv"], ["data.raw"]),
    ],
)
def test_mistakes_in_overrides(
    overrides: list[str], said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capfd, "train", *overrides)
    for text in said:
        assert text in message, message


def test_mistakes_that_need_the_data(
    shared: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What only shows once the dataset is open, before any step."""
    backend = "train.backend=fbgemm"
    for overrides, said in (
        (["+model.table_dims.C99=8"], "model.table_dims.C99"),
        ([backend, "optim=adam"], "optim.sparse.name=adam"),
        ([backend, "train.accumulate=2"], "train.accumulate=2"),
        ([backend, "train.precision=fp64"], "train.backend=fbgemm"),
        (["optim.schedule.warmup_steps=50", "optim.schedule.decay_steps=9"], "optim.schedule"),
        (["data.synthetic.seed=1"], "data.root="),
    ):
        run_dir = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        message = refusal(capfd, "train", *shared, *overrides, f"hydra.run.dir={run_dir}")
        assert said in message
        assert read_result(run_dir)["status"].startswith("failed: ")


def test_a_root_of_nothing_and_of_another_schema(
    shared: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for root in ("empty", "missing"):
        message = refusal(capfd, "train", "data=criteo_kaggle", f"data.root={root}")
        assert f"data.root={tmp_path / root}" in message
    assert dlrm("prepare", *[o for o in shared if o.startswith("data.")]) == 0
    root = next(o for o in shared if o.startswith("data.root="))
    message = refusal(capfd, "train", "data=criteo_kaggle", root)
    assert "another schema" in message
    assert "data.schema.name: prepared with synthetic, asked for criteo_kaggle" in message


def test_a_root_of_other_raw_files(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for seed in (0, 1):
        write_adult_csv(tmp_path / f"train{seed}.csv", 300, seed=seed)
    write_adult_csv(tmp_path / "test.csv", 100, seed=2)
    shared = ["data=adult", "data.raw_test=test.csv", "data.root=d"]
    assert dlrm("prepare", *shared, "data.raw_train=train0.csv") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "d").rglob("*.parquet")}
    assert before
    for verb, more in (("prepare", []), ("train", TINY_MODEL)):
        message = refusal(capfd, verb, *shared, "data.raw_train=train1.csv", *more)
        assert "data.root=" in message
        assert "data.overwrite=true" in message
    assert {path: path.read_bytes() for path in before} == before
    assert dlrm("prepare", *shared, "data.raw_train=train1.csv", "data.overwrite=true") == 0
    assert {path: path.read_bytes() for path in before} != before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evaluate"], "run="),
        (["evaluate", "run=nowhere"], "run=nowhere"),
        (["predict", "run=nowhere", "data.raw=x"], "run=nowhere"),
        (["evaluate", "run=nowhere", "part=dev"], "part=dev"),
        (["prepare", "data=synthetic", "train.epochs=1"], "train.epochs"),
        (["prepare", "data=criteo_kaggle"], "data.raw=FILE"),
    ],
)
def test_mistakes_of_the_other_verbs(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capfd, *arguments)


def test_an_output_folder_that_is_a_file(
    shared: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")
    message = refusal(capfd, "train", *shared, "hydra.run.dir=notes")
    assert "notes: File exists" in message
    assert "hydra.run.dir" in message
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_refused_command_leaves_no_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["train", "launch.nproc=0"], ["evaluate", "run=nowhere"]):
        refusal(capfd, *arguments)
        assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- our mistakes: 1


def test_an_internal_error_keeps_its_traceback(
    shared: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(self: Trainer) -> None:
        raise RuntimeError("the unforeseen")

    monkeypatch.setattr(Trainer, "fit", fail)
    assert dlrm("train", *shared, "hydra.run.dir=run") == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert "RuntimeError: the unforeseen" in err
    assert read_result(tmp_path / "run")["status"] == "failed: RuntimeError: the unforeseen"


# ----------------------------------------------------------------------------------- B45: folders


def test_relative_paths_start_where_the_command_does(shared: list[str], tmp_path: Path) -> None:
    write_adult_csv(tmp_path / "a.csv", 300, seed=0)
    write_adult_csv(tmp_path / "b.csv", 100, seed=1)
    files = ["data=adult", "data.raw_train=./a.csv", "data.raw_test=./b.csv", "data.root=./d"]
    assert dlrm("train", *files, *TINY_MODEL, "hydra.run.dir=./run") == 0
    assert (tmp_path / "d" / "manifest.json").is_file()
    assert dlrm("evaluate", "run=./run", "data.raw=./b.csv", "hydra.run.dir=eval") == 0
    assert dlrm("predict", "run=run", "data.raw=b.csv", "out=p/q.parquet") == 0
    assert (tmp_path / "p" / "q.parquet").is_file()
    assert read_result(tmp_path / "eval")["status"] == "completed"


def test_each_run_has_a_folder_of_its_own(shared: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        assert dlrm("train", *shared, "train.max_steps=1") == 0
    folders = list((tmp_path / "outputs" / "train").iterdir())
    assert len(folders) == 2
    assert all(read_result(folder)["status"] == "completed" for folder in folders)


def test_a_run_folder_named_by_a_number_keeps_its_name(shared: list[str], tmp_path: Path) -> None:
    assert dlrm("train", *shared, "train.max_steps=1", "hydra.run.dir=1_1_1") == 0
    assert (tmp_path / "1_1_1" / "result.json").is_file()
    assert dlrm("evaluate", "run=1_1_1", "hydra.run.dir=007") == 0
    assert (tmp_path / "007" / "result.json").is_file()


def test_a_used_folder_is_refused_and_left_alone(
    shared: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = [*shared, "train.max_steps=2", "hydra.run.dir=run"]
    assert dlrm("train", *again) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    message = refusal(capfd, "train", *again)
    assert "hydra.run.dir=" in message
    assert "train.overwrite=true" in message
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_an_overwritten_folder_holds_the_new_run_only(shared: list[str], tmp_path: Path) -> None:
    """The second run ends at the same step: its model, not the first one's, must be there."""
    again = [*shared, "train.max_steps=2", "hydra.run.dir=run", "train.overwrite=true"]
    assert dlrm("train", *again) == 0
    assert dlrm("train", *again, "seed=5") == 0
    result = read_result(tmp_path / "run")
    assert result["seed"] == 5
    assert dlrm("evaluate", "run=run", "hydra.run.dir=eval") == 0
    evaluated = read_result(tmp_path / "eval")["eval"]
    assert evaluated["auc"] == pytest.approx(result["eval"]["auc"], abs=1e-6)
    assert len(read_metrics(tmp_path / "run")) == 3
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


# ---------------------------------------------------------------------- processes and environments


def test_b45_b50_two_runs_at_once_need_no_port(tmp_path: Path) -> None:
    """Started together on one dataset, with relative paths, no launcher's variables, and torch's
    port taken."""
    write_adult_csv(tmp_path / "a.csv", 300, seed=0)
    write_adult_csv(tmp_path / "b.csv", 100, seed=1)
    files = ["data.raw_train=a.csv", "data.raw_test=b.csv", "data.root=./d"]
    assert dlrm("prepare", "data=adult", *files) == 0
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # Somebody else holds it: as good.
        command = ["-m", "dlrm", "train", "data=adult", "data.root=./d", *TINY_MODEL]
        more = ["train.max_steps=2", "train.backend=torch"]
        environment = {"PYTHONPATH": str(CHECKOUT)}
        runs = [start_python(*command, *more, cwd=tmp_path, **environment) for _ in range(2)]
        ended = [finish(process) for process in runs]
    assert [status for status, _, _ in ended] == [0, 0], ended
    folders = list((tmp_path / "outputs" / "train").iterdir())
    assert len(folders) == 2
    digests = {read_result(folder)["model_digest"] for folder in folders}
    assert len(digests) == 1
    assert all((folder / "report.html").is_file() for folder in folders)


_WITH_STUB = """
import sys
from dlrm.__main__ import run

shared = sys.argv[1:]
data = [argument for argument in shared if argument.startswith("data.")]
assert run(["--help"]) == run(["train", "--help"]) == 0
assert run(["prepare", *data]) == 0
assert "fbgemm_gpu" not in sys.modules
print("BEFORE TRAINING")
refused = run(["train", *shared, "train.backend=fbgemm", "hydra.run.dir=refused"])
assert refused == 2, refused
sys.exit(run(["train", *shared, "train.max_steps=2", "hydra.run.dir=run"]))
"""


def test_b52_a_broken_fbgemm_is_refused_in_one_line(shared: list[str], tmp_path: Path) -> None:
    stub = tmp_path / "stub" / "fbgemm_gpu"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(
        "raise OSError('libfbgemm.so: undefined symbol: _ZN3c1021')\n"
    )
    paths = f"{tmp_path / 'stub'}:{CHECKOUT}"
    process = start_python("-W", "error", "-c", _WITH_STUB, *shared, cwd=tmp_path, PYTHONPATH=paths)
    status, out, err = finish(process)
    assert status == 0, (out, err)
    (told,) = err.splitlines()
    assert "train.backend=fbgemm" in told
    assert "undefined symbol" in told
    assert "torch==2.13.0 with fbgemm-gpu-cpu==1.8.0" in told


def test_b52_training_goes_on_without_fbgemm(
    shared: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "fbgemm_gpu"] + ["fbgemm_gpu"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert dlrm("train", *shared, "train.max_steps=2") == 0
    assert not capfd.readouterr().err
    message = refusal(capfd, "train", *shared, "train.backend=fbgemm")
    assert "train.backend=fbgemm" in message
    assert "torch==2.13.0 with fbgemm-gpu-cpu==1.8.0" in message
    assert "train.backend=torch" in message


def test_a_foreign_package_in_the_start_folder(tmp_path: Path) -> None:
    """`python -m` puts the folder first on the path: one line says so. The command isn't fooled."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("print('FOREIGN')\n")
    module = start_python("-m", "dlrm", "train", "--cfg", "job", cwd=tmp_path)
    command = Path(sys.executable).with_name("dlrm")
    if not command.is_file():
        module.communicate()
        pytest.skip(f"the command isn't installed: no {command}")
    installed = start_python(command, "train", "--cfg", "job", cwd=tmp_path)
    status, out, err = finish(module)
    assert status == 1
    assert len(err.splitlines()) == 1, err
    assert f"'data' comes from {tmp_path / 'data' / '__init__.py'}" in err
    status, out, err = finish(installed)
    assert status == 0, err
    assert "FOREIGN" not in out
    assert "batch_size: 2048" in out
