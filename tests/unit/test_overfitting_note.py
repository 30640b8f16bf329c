"""Several epochs without a valid part: said before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.parquet import PreparedDataset
from dlrm.train import overfitting_note
from tests.commands import one_hot_dataset, write_visits
from tests.trainer_ranks import make_config


@pytest.fixture(scope="module")
def without_valid(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_visits(tmp_path_factory.mktemp("visits"), 40)


def note_of(dataset: PreparedDataset, **train: Any) -> str | None:
    return overfitting_note(make_config({"train": train}), dataset)


def test_f43_several_epochs_without_a_valid_part_are_told(without_valid: PreparedDataset) -> None:
    note = note_of(without_valid, epochs=3)
    assert note is not None
    assert "train.epochs=3" in note
    assert "data.schema.split.valid=0.1" in note


def test_f43_nothing_is_told_of_one_epoch_or_with_a_valid_part(
    without_valid: PreparedDataset, tmp_path: Path
) -> None:
    assert note_of(without_valid, epochs=1) is None
    assert note_of(one_hot_dataset(tmp_path / "synthetic"), epochs=3) is None
