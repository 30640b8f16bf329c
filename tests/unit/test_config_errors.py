"""Mistakes in keys and in files of conf/: one plain message with the key and what to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlrm.__main__ import add_entry
from tests.commands import compose_config, dlrm

GOOD = """\
defaults: [base, _self_]
name: x
schema:
  name: x
  format: {kind: csv, delimiter: ",", header: true}
  label: {column: label, positive: ["1"], negative: ["0"]}
  dense: {x: {transform: identity}}
  sparse: {item: {token: int, vocabulary: dictionary, missing: row}}
  split: {kind: given}
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+train.epoch=3", "train.epoch: there is no such key, .* did you mean train.epochs"),
        ("++optim.sprse.lr=1", "optim.sprse: there is no such key, .* did you mean optim.sparse"),
        ("data.synthetic.num_tran=5", "there is no such key; did you mean .*synthetic.num_train"),
        ("train.epochs=two", "train.epochs=two: must be a whole number"),
        ("optim.schedule.decay_steps=0.3", "it is optim.schedule.decay_share=0.3"),
        ("optim.schedule.warmup_steps=.1", "it is optim.schedule.warmup_share=0.1"),
        ("train.overlap=maybe", "train.overlap=maybe: must be true or false"),
        ("model.bottom_mlp=8", r"model.bottom_mlp: must be a list, model.bottom_mlp=\[A,B\]"),
        ("data.batch_size=null", "data.batch_size: must have a value"),
        (
            "optim.sparse=adam",
            "optim.sparse: must be keys .*; to choose one, set optim.sparse.name",
        ),
        ("~train.epochs", "train.epochs can't be removed"),
        ("launch=2", r"launch= chooses a file of conf/launch/ by its name; .* launch\.KEY=2"),
        ("data=syntetic", "Could not find 'data/syntetic'; .* did you mean data=synthetic"),
    ],
)
def test_f45_a_key_s_mistake_is_told_plainly(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dlrm("train", override, f"hydra.run.dir={tmp_path / 'run'}") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert re.search(message, told), told
    assert "full_key" not in told


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dense: {x: {transform: identity}}", "dense: {Month: }", "write `Month: {}`"),
        (
            "missing: row",
            "mising: row",
            "item.mising: there is no such key; did you mean .*missing",
        ),
        (
            "transform: identity",
            "transfrm: identity",
            r"did you mean data\.schema\.dense\.x\.transf",
        ),
        (
            "defaults: [base, _self_]\n",
            "",
            r"data\.cache: has no value; .*defaults: \[base, _self_",
        ),
        ("{kind: given}", "{kind: given", r"x\.yaml, line 10: expected"),
        ("  split", "\tsplit", r"x\.yaml, line 9: a tab; indent with spaces"),
        ("  split: {", "  name: y\n  split: {", r"x\.yaml, line 9: found duplicate key name"),
    ],
)
def test_f45_a_schema_s_mistake_is_told_plainly(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also F53's: a tab, a doubled key."""
    folder = tmp_path / "conf" / "data"
    folder.mkdir(parents=True)
    assert GOOD.count(old) == 1
    (folder / "x.yaml").write_text(GOOD.replace(old, new))
    arguments = [f"--config-dir={folder.parent}", "data=x", "data.raw_train=none.csv"]
    assert dlrm("train", *arguments, f"hydra.run.dir={tmp_path / 'run'}") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert re.search(message, told), told


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.table_dims={C1:8,C2:4}"],
        ["+model.table_dims={C1:8}", "model.table_dims.C2=4"],
        ["model.table_dims.C1=8", "++model.table_dims.C2=4"],
    ],
)
def test_f45_table_dims_need_no_plus(overrides: list[str]) -> None:
    assert compose_config("train", *overrides).model.table_dims == {"C1": 8, "C2": 4}


def test_f45_names_with_a_colon_can_be_typed() -> None:
    config = compose_config(
        "train",
        "model.table_dims.a:b=8",
        "model.table_dims.C1=4",
        "sharding.tables.a:b.layout=row_wise",
        "sharding.tables.c d (e).memory=host",
    )
    assert config.model.table_dims == {"a:b": 8, "C1": 4}
    assert config.sharding.tables["a:b"].layout == "row_wise"
    assert config.sharding.tables["c d (e)"].memory == "host"


def test_f45_other_overrides_stay_as_they_are() -> None:
    for override in ("model.embedding_dim=8", "-m", "sharding=auto", "train.epochs"):
        assert add_entry(override) == override
