"""The generator: its teacher, its rates, its determinism, and the same rows as raw Criteo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from data.errors import UserError
from data.parquet import Order, PreparedDataset
from data.synthetic import (
    CHUNK_ROWS,
    TEACHER_COLUMN,
    SyntheticConfig,
    Teacher,
    synthesise,
    write_raw_tsv,
)
from tests.commands import (
    TINY_DATA,
    TINY_MODEL,
    column_in_order,
    dlrm,
    read_result,
    tiny,
    without_plots,
)

TINY = SyntheticConfig(num_train=3000, num_valid=500, num_test=700, cardinality_scale=1e-4)
PARTS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("synthetic") / "d"
    synthesise(TINY, root)
    return root


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_teacher_is_as_good_and_as_often_right_as_stated(seed: int) -> None:
    """AUC of the label probabilities, computed by scikit-learn; the label rate as asked."""
    chunk = Teacher(SyntheticConfig(seed=seed)).chunk(0)
    probability_B = expit(chunk.logit_B)
    assert 0.78 < roc_auc_score(chunk.label_B, probability_B) < 0.85
    assert chunk.label_B.mean() == pytest.approx(0.256, abs=0.01)
    # Labels are drawn with these probabilities: calibrated as a whole and in every tenth.
    for tenth in np.array_split(np.argsort(probability_B), 10):
        deviation = np.sqrt((probability_B[tenth] * (1 - probability_B[tenth])).mean() / len(tenth))
        observed = chunk.label_B[tenth].mean()
        assert abs(observed - probability_B[tenth].mean()) < 4.5 * deviation


def test_the_run_reports_the_teacher_s_figures(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """best_auc and best_logloss are those of the stored probabilities of the test rows."""
    without_plots(monkeypatch)
    shared = [*tiny(tmp_path_factory), "train.max_steps=1", f"hydra.run.dir={tmp_path / 'run'}"]
    assert dlrm("train", *shared) == 0
    root = tmp_path_factory.getbasetemp() / "tiny"
    label_B = column_in_order(root, "test", "__label")
    probability_B = expit(column_in_order(root, "test", TEACHER_COLUMN).astype(float))
    data = read_result(tmp_path / "run")["data"]
    assert data["best_auc"] == pytest.approx(roc_auc_score(label_B, probability_B), abs=1e-6)
    assert data["best_logloss"] == pytest.approx(log_loss(label_B, probability_B), abs=1e-6)


def test_a_row_depends_on_seed_and_place_only(prepared: Path, tmp_path: Path) -> None:
    """Another number of training rows leaves them what they were; another seed nothing."""
    synthesise(replace(TINY, num_train=2000, num_valid=0, num_test=0), tmp_path / "fewer")
    for name in ("__label", "I1", "C3", TEACHER_COLUMN):
        whole = column_in_order(prepared, "train", name)
        fewer = column_in_order(tmp_path / "fewer", "train", name)
        np.testing.assert_array_equal(whole[:2000], fewer)
    synthesise(replace(TINY, seed=1), tmp_path / "other")
    other = column_in_order(tmp_path / "other", "train", TEACHER_COLUMN)
    logit_B = column_in_order(prepared, "train", TEACHER_COLUMN)
    assert np.abs(other - logit_B).min() > 0 or (other != logit_B).mean() > 0.99


def test_generating_twice_gives_the_same_bytes(prepared: Path, tmp_path: Path) -> None:
    synthesise(TINY, tmp_path / "again")
    files = sorted(path.relative_to(prepared) for path in prepared.rglob("*") if path.is_file())
    again = tmp_path / "again"
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    for path in files:
        assert (again / path).read_bytes() == (prepared / path).read_bytes(), path


def test_parts_are_consecutive_rows_of_one_stream(prepared: Path) -> None:
    chunk = Teacher(TINY).chunk(0)
    logit_B = np.concatenate([column_in_order(prepared, p, TEACHER_COLUMN) for p in PARTS])
    np.testing.assert_array_equal(logit_B, chunk.logit_B[:4200].astype(np.float32))
    assert len(chunk.label_B) == CHUNK_ROWS


def test_ids_are_ranks_and_missing_has_a_row_of_its_own(prepared: Path) -> None:
    """Every id lies in its table; the first row is 'missing' and is used as often as in Criteo."""
    dataset = PreparedDataset(prepared)
    for batch in dataset.batches("train", Order(3000)):
        for index, feature in enumerate(dataset.features):
            ids = batch.ids.values_L[index * 3000 : (index + 1) * 3000]
            assert int(ids.min()) >= 0
            assert int(ids.max()) < dataset.manifest.table_rows[feature.table]
        share = {f.name: i for i, f in enumerate(dataset.features)}
        missing = batch.ids.values_L.view(26, 3000).eq(0).float().mean(1)
        assert float(missing[share["C22"]]) == pytest.approx(0.82, abs=0.03)
        assert float(missing[share["C1"]]) == 0


def test_raw_rows_are_the_same_rows(prepared: Path, tmp_path: Path) -> None:
    """`raw_out` writes Criteo's format: 40 fields, counts, ids of 8 hex digits, empty = missing."""
    path = tmp_path / "raw.tsv"
    assert write_raw_tsv(TINY, path) == 4200
    lines = path.read_text().splitlines()
    assert len(lines) == 4200
    fields = [line.split("\t") for line in lines]
    assert {len(f) for f in fields} == {40}
    labels = np.concatenate([column_in_order(prepared, part, "__label") for part in PARTS])
    np.testing.assert_array_equal([int(f[0]) for f in fields], labels)
    ids = np.concatenate([column_in_order(prepared, part, "C3") for part in PARTS])
    tokens = [f[16] for f in fields]
    assert {len(token) for token in tokens} == {0, 8}
    # One token for each id, and none for a missing one.
    assert len(set(zip(tokens, ids.tolist(), strict=True))) == len(set(tokens)) == len(set(ids))
    assert {i for token, i in zip(tokens, ids, strict=True) if not token} == {0}
    counts = np.concatenate([column_in_order(prepared, part, "I5") for part in PARTS])
    raw = np.array([float(f[5] or 0) for f in fields])
    np.testing.assert_allclose(counts, np.log1p(np.maximum(raw, 0)), rtol=1e-6)


def test_raw_rows_go_through_prepare_and_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same rows, generated straight and by way of raw Criteo, have equal labels."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)
    raw_out = "data.synthetic.raw_out=sub/raw.tsv"
    assert dlrm("prepare", "data=synthetic", *TINY_DATA, raw_out) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["sub"]
    kaggle = ["data=criteo_kaggle", "data.raw=sub/raw.tsv", "data.root=kaggle"]
    assert dlrm("prepare", *kaggle) == 0
    more = [*TINY_MODEL, "train.max_steps=3", "hydra.run.dir=run"]
    assert dlrm("train", *kaggle, *more) == 0
    assert read_result(tmp_path / "run")["train"]["steps"] == 3
    assert dlrm("prepare", "data=synthetic", *TINY_DATA, "data.root=straight") == 0
    for name in ("__label", "I2"):
        both = [
            np.concatenate([column_in_order(tmp_path / root, part, name) for part in PARTS])
            for root in ("straight", "kaggle")
        ]
        assert len(both[0]) == 4096 + 512 + 1024
        np.testing.assert_array_equal(*both)
    capfd.readouterr()
    assert dlrm("prepare", "data=synthetic", *TINY_DATA, raw_out) == 2
    assert "data.synthetic.raw_out" in capfd.readouterr().err


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_the_label_rate_is_as_asked(rate: float) -> None:
    chunk = Teacher(SyntheticConfig(label_rate=rate, cardinality_scale=1e-4)).chunk(1)
    assert chunk.label_B.mean() == pytest.approx(rate, abs=0.01)


def test_a_root_of_other_settings_is_refused(prepared: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root=.* holds another dataset"):
        synthesise(replace(TINY, zipf=1.2), prepared)
