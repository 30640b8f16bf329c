"""Every file of `conf/` composes and converts, and the fixed keys keep their names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dlrm.config import RUN_CONFIGS
from embeddings.plan_choice import LAYOUTS
from tests.commands import compose_config, dlrm

CONF = Path(__file__).parents[2] / "conf"
VERBS = ("export", "prepare", "train", "evaluate", "predict", "check", "bench")


def options(group: str) -> list[str]:
    found = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    assert found
    return found


GROUPS = ("data", "model", "optim", "sharding", "train", "launch", "experiment")
# `base` is what the other files of its group begin with, not a choice.
CHOICES = [(g, option) for g in GROUPS for option in options(g) if (g, option) != ("data", "base")]


def test_no_file_of_conf_is_forgotten() -> None:
    groups = {path.parent.name for path in CONF.rglob("*.yaml")}
    assert groups == {"conf", "hydra", *GROUPS}
    assert {path.stem for path in CONF.glob("*.yaml")} == set(VERBS) == set(RUN_CONFIGS)


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_choice_composes_and_converts(group: str, option: str) -> None:
    needed = ["sharding.plan=plan.json"] if (group, option) == ("sharding", "file") else []
    config = compose_config("train", f"{group}={option}", *needed)
    assert type(config) is RUN_CONFIGS["train"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        assert not OmegaConf.is_config(value), field.name
    if group in ("data", "model"):
        assert getattr(config, group).name == option
    if group == "sharding":
        assert config.sharding.layout == option
    if group == "data":
        prepare = compose_config("prepare", f"data={option}")
        assert prepare.data == config.data


@pytest.mark.parametrize("option", options("optim"))
def test_an_optimizer_is_named_by_its_rows_rule(option: str) -> None:
    assert compose_config("train", f"optim={option}").optim.sparse.name == option


@pytest.mark.parametrize("option", options("experiment"))
def test_experiments_take_further_overrides(option: str) -> None:
    """schema < groups < train.yaml < experiment < command line."""
    plain = compose_config("train", f"experiment={option}")
    config = compose_config("train", f"experiment={option}", "train.epochs=77", "optim=sgd")
    assert plain.train.epochs != 77
    assert config.train.epochs == 77
    assert config.optim.sparse.name == "sgd"
    assert config.data == plain.data


def test_values_of_files_win_over_those_of_classes() -> None:
    """With `_self_` first, every value of a file would silently be the class's (a known trap)."""
    config = compose_config("train")
    assert config.optim.sparse.lr == 0.02
    assert type(config.optim.sparse)().lr != 0.02
    assert config.data.synthetic.num_train == 1_500_000


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_verbs_that_score(verb: str) -> None:
    config = compose_config(verb, "run=r", "data.raw=[a,b]", "checkpoint=latest")
    assert (config.run, config.data.raw, config.checkpoint) == ("r", ["a", "b"], "latest")
    assert isinstance(config.data.raw, list)
    assert compose_config(verb, "run=r", "part=valid").part == "valid"


def keys(node: Any, prefix: str = "") -> set[str]:
    found = set()
    for name, value in node.items():
        found.add(f"{prefix}{name}")
        if isinstance(value, dict):
            found |= keys(value, f"{prefix}{name}.")
    return found


# Fixed keys, as far as they exist: people's scripts use these names.
FIXED = {
    "data.raw",
    "data.raw_train",
    "data.raw_valid",
    "data.raw_test",
    "data.root",
    "data.batch_size",
    "optim.sparse.name",
    "optim.sparse.lr",
    "optim.sparse.eps",
    "optim.dense.name",
    "optim.dense.lr",
    "sharding.exchange",
    "sharding.memory",
    "sharding.wire",
    "sharding.plan",
    "sharding.tables",
    "train.epochs",
    "train.max_steps",
    "train.eval_every",
    "train.precision",
    "train.accumulate",
    "train.checkpoint_every",
    "train.resume",
    "launch.nproc",
    "launch.device",
    "seed",
}


def test_fixed_keys_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert dlrm("train", "--cfg", "job") == 0
    printed = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert keys(printed) >= FIXED, FIXED - keys(printed)


def test_fixed_choices_are_there() -> None:
    assert {"synthetic", "criteo_kaggle", "criteo_1tb", "adult", "bank"} <= set(options("data"))
    assert {"dlrm", "dlrm_dcnv2"} <= set(options("model"))
    assert set(options("sharding")) == {*LAYOUTS, "file"}
    config = compose_config("train")
    assert (config.data.name, config.model.name) == ("synthetic", "dlrm")
    assert (config.train.precision, config.launch.nproc, config.launch.device) == ("fp32", 1, "cpu")


# One line for each key: a changed default, name or file shows in this list when reviewed.
GOLDEN = """\
data.batch_size 2048
data.eval_batch_size 8192
data.shuffle True
data.synthetic.num_train 1500000
data.synthetic.cardinality_scale 0.01
launch.num_threads None
launch.transport auto
model.bottom_mlp [512, 256]
model.embedding_dim 16
model.interaction dot
model.top_mlp [512, 256]
optim.clip_norm None
optim.dense.name adagrad
optim.eps 1e-08
optim.sparse.name adagrad
seed 0
sharding.exchange auto
sharding.layout auto
sharding.wire fp32
train.accumulate 1
train.backend auto
train.epochs 1
train.log_every 50
train.max_steps None
train.overwrite False
"""


def test_the_defaults_of_a_plain_run() -> None:
    """What `dlrm train` without arguments does, which the README states."""
    config = dataclasses.asdict(compose_config("train"))
    for line in GOLDEN.splitlines():
        key, value = line.split(" ", 1)
        found: Any = config
        for name in key.split("."):
            found = found[name]
        assert str(found) == value, key


@pytest.mark.parametrize("data", ["criteo_kaggle", "criteo_1tb"])
def test_criteo_has_its_40_columns(data: str) -> None:
    schema = compose_config("train", f"data={data}").data.schema
    dense, sparse = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
    assert schema.format.columns == ["label", *dense, *sparse]
    assert (list(schema.dense), list(schema.sparse)) == (dense, sparse)
    assert {column.transform for column in schema.dense.values()} == {"log1p"}
    assert schema.format.delimiter == "\t"


def test_the_mlperf_model_is_mlperf_s() -> None:
    """MLPerf Training's DLRM-DCNv2: dim 128, 3 cross layers of rank 512."""
    model = compose_config("train", "model=dlrm_dcnv2").model
    assert (model.embedding_dim, model.dcn_layers, model.dcn_rank) == (128, 3, 512)
    assert model.bottom_mlp == [512, 256]
    assert model.top_mlp == [1024, 1024, 512, 256]
