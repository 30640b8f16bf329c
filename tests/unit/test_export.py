"""`dlrm export`: what is written, read back with numpy, pyarrow and torch alone."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from sklearn.metrics import roc_auc_score

from data.parquet import Order, PreparedDataset
from data.vocabulary import load_dictionary
from dlrm.checkpoint import open_checkpoint
from dlrm.config import ExportRun, to_config
from dlrm.export import run_export
from dlrm.export_model import ExportableModel, model_inputs
from tests.commands import (
    TINY_MODEL,
    arrays_of,
    build_trainer,
    column_in_order,
    dlrm,
    latest,
    read_json,
    read_result,
    without_plots,
    write_adult_csv,
    write_visits,
)


@pytest.fixture(autouse=True)
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def adult(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prepared/ (text tokens in dictionaries), test.csv and run/."""
    folder = tmp_path_factory.mktemp("adult")
    for seed, (name, rows) in enumerate((("train", 1200), ("valid", 200), ("test", 301))):
        write_adult_csv(folder / f"{name}.csv", rows, seed=seed)
    files = [f"data.raw_{part}={folder / f'{part}.csv'}" for part in ("train", "valid", "test")]
    more = ["train.epochs=3", f"data.root={folder / 'prepared'}", f"hydra.run.dir={folder / 'run'}"]
    with pytest.MonkeyPatch.context() as patched:
        without_plots(patched)
        assert dlrm("train", "data=adult", *files, *TINY_MODEL, "data.batch_size=64", *more) == 0
    return folder


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """Bags with weights and means, empty ones, a shared table; all rows are in the train part."""
    return write_visits(tmp_path_factory.mktemp("visits"), 61)


def run_on(dataset: PreparedDataset, folder: Path, overrides: dict[str, Any]) -> Path:
    """A trained run's folder, as far as an export reads it."""
    parts = build_trainer(dataset, folder, overrides)
    folder.joinpath("config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(parts.config)))
    entry = {"root": str(dataset.root), "digest": dataset.manifest.digest()}
    folder.joinpath("dataset.json").write_text(json.dumps(entry))
    parts.trainer.fit()
    return folder


def export(run: Path, out: str, **values: Any) -> dict[str, Any]:
    """`run_export` with `part=train` and such; the keys of `export.` in a dictionary."""
    given = OmegaConf.merge(OmegaConf.structured(ExportRun(run=str(run))), values)
    config: ExportRun = to_config(given)  # type: ignore[arg-type]
    return run_export(config, Path(out), lambda line: None)


def exported(adult: Path, name: str, *more: str) -> dict[str, Any]:
    """result.json of the command."""
    assert dlrm("export", f"run={adult / 'run'}", f"hydra.run.dir={name}", *more) == 0
    return read_result(Path(name))


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The message of a command that exits with 2 and leaves no folder."""
    capfd.readouterr()
    assert dlrm("export", *arguments, "hydra.run.dir=refused") == 2
    assert not Path("refused").exists()
    message = capfd.readouterr().err
    assert "Traceback" not in message
    return message


def tokens_of_rows(root: Path, table: str) -> dict[int, str]:
    """From the dataset's dictionary, with plain pyarrow."""
    stored = pq.read_table(root / "vocabulary" / f"{table}.parquet")
    return dict(zip(stored["row"].to_pylist(), stored["token"].to_pylist(), strict=True))


# ----------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("piece_bytes", [None, 200])
def test_a_table_is_exported_row_by_row_with_its_tokens(
    piece_bytes: int | None, adult: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one stretch, and in stretches of a few rows that end within the windows of tokens."""
    if piece_bytes:
        monkeypatch.setattr("dlrm.export_tables.PIECE_BYTES", piece_bytes)
        monkeypatch.setattr("dlrm.export_rows.WINDOW_ROWS", 7)
    result = exported(adult, "all")
    stored = arrays_of(latest(adult / "run", "best"))
    assert set(result["tables"]) == set(open_checkpoint(latest(adult / "run", "best")).tables)
    for table, entry in result["tables"].items():
        written = pq.read_table(Path("all") / entry["file"])
        vectors = np.array(written["vector"].to_pylist(), dtype=np.float32)
        np.testing.assert_array_equal(vectors, stored[f"{table}.weight"], err_msg=table)
        assert written["row"].to_pylist() == list(range(entry["rows"]))
        tokens = tokens_of_rows(adult / "prepared", table)
        assert written["token"].to_pylist() == [tokens.get(row) for row in range(entry["rows"])]
        kinds = ["unknown", "missing"] + ["token"] * len(tokens)
        assert written["kind"].to_pylist() == kinds
    schema = pq.read_schema("all/education.parquet")
    assert str(schema.field("vector").type) == "fixed_size_list<element: float>[16]"


def test_numpy_reads_the_matrix_and_its_tokens(
    adult: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm.export_tables.PIECE_BYTES", 300)
    more = ["export.tables=[education,sex]", "export.format=npy", "export.out=out/npy"]
    result = exported(adult, "npy", *more)
    names = {
        f"{table}.{end}" for table in ("education", "sex") for end in ("npy", "tokens.parquet")
    }
    assert {path.name for path in Path("out/npy").iterdir()} == names
    assert {entry["file"] for entry in result["files"]} == names
    stored = arrays_of(latest(adult / "run", "best"))
    for table in ("education", "sex"):
        matrix = np.load(Path("out/npy") / f"{table}.npy")
        np.testing.assert_array_equal(matrix, stored[f"{table}.weight"])
        rows = pq.read_table(Path("out/npy") / f"{table}.tokens.parquet")
        tokens = tokens_of_rows(adult / "prepared", table)
        assert rows["token"].to_pylist() == [tokens.get(row) for row in range(len(matrix))]


def test_fp64_tables_stay_fp64_and_hashed_ones_have_no_tokens(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    run = run_on(visits, tmp_path / "run", {"train": {"precision": "fp64"}})
    result = export(run, "tables")
    stored = arrays_of(latest(run))
    written = pq.read_table("tables/many.parquet")
    assert str(written.schema.field("vector").type) == "fixed_size_list<element: double>[4]"
    np.testing.assert_array_equal(np.array(written["vector"].to_pylist()), stored["many.weight"])
    assert set(written["kind"].to_pylist()) == {"hash"}
    assert written["token"].null_count == len(written)
    export(run, "arrays", export={"format": "npy"})
    assert sorted(path.name for path in Path("arrays").iterdir()) == [
        "many.npy",
        "result.json",
        "shared.npy",
        "words.npy",
    ]
    assert result["tables"]["shared"]["dtype"] == "float64"


@pytest.mark.parametrize("checkpoint", ["best", "latest", "path"])
def test_any_checkpoint_can_be_exported(checkpoint: str, adult: Path) -> None:
    folder = sorted((adult / "run" / "checkpoints").glob("step-*"))[0]
    if checkpoint != "path":
        folder = latest(adult / "run", checkpoint)
    given = folder if checkpoint == "path" else checkpoint
    result = exported(adult, "out", f"checkpoint={given}", "export.tables=[sex]")
    assert (result["checkpoint"], result["step"]) == (str(folder), open_checkpoint(folder).step)
    vectors = np.array(pq.read_table("out/sex.parquet")["vector"].to_pylist(), dtype=np.float32)
    np.testing.assert_array_equal(vectors, arrays_of(folder)["sex.weight"])


def test_a_failure_leaves_nothing(adult: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second table's file can't be written: neither it nor the first one's stays."""
    real = builtins.open

    def full(path: Any, *more: Any, **options: Any) -> Any:
        if str(path).endswith("sex.parquet.partial"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, *more, **options)

    monkeypatch.setattr("data.files.open", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        export(adult / "run", "own", export={"tables": ["education", "sex"], "out": "out"})
    assert not Path("out").exists()
    assert list(Path("own").iterdir()) == []


# ------------------------------------------------------------------------------------------ model


def test_the_exported_model_predicts_as_dlrm_predict(adult: Path) -> None:
    """Loaded with torch alone, its inputs made by hand from the prepared columns."""
    result = exported(adult, "model", "export.what=model", "export.samples=250")
    compared = result["model"]["compared"]
    assert (compared["part"], compared["samples"]) == ("test", 250)
    assert compared["largest_difference"] <= 1e-6
    raw = f"data.raw={adult / 'test.csv'}"
    assert dlrm("predict", f"run={adult / 'run'}", raw, "out=predicted.parquet") == 0
    expected = pq.read_table("predicted.parquet")["probability"].to_numpy()

    inputs = read_json(Path("model/inputs.json"))
    root = adult / "prepared"
    dense_BN = np.stack([column_in_order(root, "test", d["name"]) for d in inputs["dense"]], axis=1)
    ids = [torch.from_numpy(column_in_order(root, "test", f["name"])) for f in inputs["ids"]]
    assert {feature["form"] for feature in inputs["ids"]} == {"id"}
    module = torch.export.load("model/model.pt2").module()
    for start, stop in ((0, 301), (0, 2), (7, 110)):  # Of any size, from two on.
        batch = [feature[start:stop].long() for feature in ids]
        logits = module(torch.from_numpy(dense_BN[start:stop]).float(), batch)
        probabilities = 1 / (1 + np.exp(-logits.double().numpy()))
        np.testing.assert_allclose(probabilities, expected[start:stop], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"train": {"precision": "fp64"}},
        {"model": {"table_dims": {"many": 2, "words": 6}}},
        {"model": {"interaction": "dcnv2", "dcn_rank": 3, "table_dims": {"shared": 8}}},
        {"model": {"interaction": "cat", "top_mlp": []}},
    ],
    ids=["dot", "fp64", "dims", "dcnv2", "cat"],
)
def test_bags_weights_means_and_shared_tables_are_exported(
    overrides: dict[str, Any], visits: PreparedDataset, tmp_path: Path
) -> None:
    """61 rows in batches of 12: the last has one sample, which exported models can't take alone."""
    run = run_on(visits, tmp_path / "run", overrides)
    more = {"part": "train", "data": {"batch_size": 12}}
    result = export(run, "model", export={"what": "model"}, **more)
    compared = result["model"]["compared"]
    assert compared["samples"] == 61
    assert compared["largest_difference"] <= 1e-6
    forms = {f["name"]: f["form"] for f in read_json(Path("model/inputs.json"))["ids"]}
    assert forms == {"a": "bags", "b": "bags", "many": "bags", "words": "weighted_bags"}


def test_a_bag_may_be_empty_or_long(visits: PreparedDataset, tmp_path: Path) -> None:
    """A mean by hand: bags of 0, 1 and 40 ids, more than any that the model was traced with."""
    run = run_on(visits, tmp_path / "run", {})
    export(run, "model", part="train", export={"what": "model"})
    module = torch.export.load("model/model.pt2").module()
    stored = arrays_of(latest(run))["many.weight"]
    none = (torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    many_L = torch.arange(41) % 31
    offsets = torch.tensor([0, 0, 1, 41])
    logits = module(torch.zeros(3, 2), [none, none, (many_L, offsets), (*none, torch.empty(0))])

    trainer = build_trainer(visits, tmp_path / "again", {}).trainer
    trainer.model.load_state_dict(open_checkpoint(latest(run)).dense())
    pooled_BS = torch.zeros(3, 16)
    pooled_BS[1, 8:12] = torch.from_numpy(stored[many_L[0]])
    pooled_BS[2, 8:12] = torch.from_numpy(stored[many_L[1:].numpy()].mean(axis=0))
    expected = trainer.model(torch.zeros(3, 2), pooled_BS)
    torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-6)


def test_a_bf16_run_is_compared_in_fp32_and_says_so(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    run = run_on(visits, tmp_path / "run", {"train": {"precision": "bf16"}})
    result = export(run, "model", part="train", export={"what": "model"})
    compared = result["model"]["compared"]
    assert compared["largest_difference"] <= 1e-6
    assert 1e-6 < compared["largest_difference_from_bf16"] < 0.1


def test_a_model_that_predicts_otherwise_is_refused(
    adult: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: one table's rows are scaled on their way into the exported model."""
    planted = ExportableModel.__init__

    def scaled(self: Any, features: Any, tables: Any, model: Any) -> None:
        planted(self, features, {**tables, "education": tables["education"] * 1.01}, model)

    monkeypatch.setattr(ExportableModel, "__init__", scaled)
    message = refusal(capfd, f"run={adult / 'run'}", "export.what=model", "export.out=out")
    assert "differ by up to" in message
    assert "test part" in message
    assert not Path("out").exists()


# -------------------------------------------------------------------------------------- quantized


def test_quantised_tables_are_as_documented_and_their_auc_is_told(
    adult: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored with numpy; the AUC with them is computed again by scikit-learn."""
    monkeypatch.setattr("dlrm.export_tables.PIECE_BYTES", 300)
    result = exported(adult, "q", "export.what=quantized")
    stored = arrays_of(latest(adult / "run", "best"))
    info = open_checkpoint(latest(adult / "run", "best"))
    restored: dict[str, torch.Tensor] = {}
    for table, entry in result["tables"].items():
        fused = np.load(Path("q") / entry["file"])
        values, dim = stored[f"{table}.weight"], entry["dim"]
        assert fused.dtype == np.uint8
        assert fused.shape == (entry["rows"], dim + 8)
        scale_bias = fused[:, dim:].copy().view("<f4")
        rows = fused[:, :dim] * scale_bias[:, :1] + scale_bias[:, 1:]
        error = np.abs(rows - values)
        assert (error <= scale_bias[:, :1] * 0.501).all()
        assert entry["largest_error"] == pytest.approx(error.max(), rel=1e-3)
        assert entry["largest_error"] > 0
        restored[table] = torch.from_numpy(rows.astype(np.float32))

    compared = result["compared"]
    assert compared["part"] == "test"
    assert compared["eval"]["auc"] == pytest.approx(read_result(adult / "run")["eval"]["auc"])
    assert compared["auc_loss"] == compared["eval"]["auc"] - compared["eval_int8"]["auc"]
    dataset = PreparedDataset(adult / "prepared")
    trainer = build_like(adult, info, dataset)
    model = ExportableModel(dataset.features, restored, trainer)
    (batch,) = dataset.batches("test", Order(1000))
    with torch.no_grad():
        logits_B = model(*model_inputs(batch, dataset.features))
    assert batch.label_B is not None
    auc = roc_auc_score(batch.label_B.numpy(), logits_B.double().numpy())
    assert compared["eval_int8"]["auc"] == pytest.approx(auc, abs=1e-4)


def build_like(adult: Path, info: Any, dataset: PreparedDataset) -> Any:
    """The run's dense network."""
    from dlrm.build import build_model
    from dlrm.score import stored_config

    model = build_model(stored_config(adult / "run" / "config.yaml"), dataset.manifest)
    model.load_state_dict(info.dense())
    return model


def test_one_table_can_be_quantised_alone(adult: Path) -> None:
    result = exported(adult, "q", "export.what=quantized", "export.tables=[sex]", "part=valid")
    assert list(result["tables"]) == ["sex"]
    assert result["compared"]["part"] == "valid"
    assert [path.name for path in Path("q").glob("*.npy")] == ["sex.int8.npy"]


def test_without_fbgemm_quantised_tables_are_refused(
    adult: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    message = refusal(capfd, f"run={adult / 'run'}", "export.what=quantized")
    assert "export.what=quantized needs fbgemm" in message


# --------------------------------------------------------------------------------------- refusals


def test_mistakes_are_refused_and_name_the_key(
    adult: Path, visits: PreparedDataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = f"run={adult / 'run'}"
    for arguments, expected in (
        ([], "run= is missing"),
        (["run=nowhere"], "run=nowhere: no run folder"),
        ([run, "export.tables=[sex,nope,C1]"], "export.tables: no such table: nope, C1"),
        ([run, "export.tables=[]"], "export.tables=[]: name at least one"),
        ([run, "export.what=onnx"], "export.what=onnx: must be one of tables, model, quantized"),
        ([run, "export.what=model", "export.tables=[sex]"], "export.tables=['sex']"),
        ([run, "export.what=quantized", "export.format=parquet"], "export.format=parquet"),
        ([run, "export.what=model", "export.format=npy"], "export.format=npy"),
        ([run, "checkpoint=nowhere"], "checkpoint=nowhere"),
        ([run, "part=dev"], "part=dev: must be train, valid or test"),
        ([run, f"data.root={visits.root}"], "data.root="),
    ):
        assert expected in refusal(capfd, *arguments), arguments
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine.txt").write_text("mine")
    assert f"export.out={used} is used" in refusal(capfd, run, f"export.out={used}")
    assert [path.name for path in used.iterdir()] == ["mine.txt"]
    bare = run_on(visits, tmp_path / "bare", {})
    for what in ("model", "quantized"):
        message = refusal(capfd, f"run={bare}", f"export.what={what}", "checkpoint=latest")
        assert "part=test: the part is empty" in message


def test_what_is_ignored_is_told(adult: Path) -> None:
    with pytest.warns(UserWarning, match=r"part=valid is ignored: export\.what=tables"):
        ExportRun(run=str(adult), part="valid")


def test_the_dictionary_s_own_lookup_agrees(adult: Path) -> None:
    """Tokens → rows as raw files are read, against row → token as it is exported."""
    exported(adult, "out", "export.tables=[education]")
    import xxhash

    written = pq.read_table("out/education.parquet").filter(
        pq.read_table("out/education.parquet")["token"].is_valid()
    )
    dictionary = load_dictionary(adult / "prepared" / "vocabulary" / "education.parquet", 99)
    keys = np.array(
        [xxhash.xxh64_intdigest(token.encode()) for token in written["token"].to_pylist()],
        dtype=np.uint64,
    )
    order = np.argsort(keys)
    found = dictionary.lookup(keys[order])
    np.testing.assert_array_equal(found, written["row"].to_numpy()[order])
