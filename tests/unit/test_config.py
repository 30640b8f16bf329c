"""Values out of range, keys that nothing reads, and texts that look like numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from data.errors import UserError
from data.schema import (
    DenseColumn,
    LabelColumn,
    RawFormat,
    Schema,
    SparseColumn,
    Split,
    check_schema,
)
from data.synthetic import SyntheticConfig
from dlrm.__main__ import _keep_text
from dlrm.config import (
    CheckRun,
    DataConfig,
    LaunchConfig,
    ScoreDataConfig,
    ScoreRun,
    TrainConfig,
    TrainRun,
    WarmStartConfig,
    to_config,
)
from dlrm.model import ModelConfig
from dlrm.optim import DenseOptimConfig, OptimConfig, ScheduleConfig, SparseOptimConfig
from dlrm.score import stored_config
from tests.commands import TINY_MODEL, compose_config

DATA = {"name": "d", "cache": "c"}


def refused(build: Any, values: dict[str, Any], key: str) -> None:
    """`build(**values)` is refused with a message that names `key` and the value."""
    with pytest.raises(UserError) as caught:
        build(**values)
    message = str(caught.value)
    assert key in message, message
    assert "\n" not in message, message


@pytest.mark.parametrize(
    ("build", "values", "key"),
    [
        (TrainConfig, {"epochs": 0}, "train.epochs=0"),
        (TrainConfig, {"max_steps": 0}, "train.max_steps=0"),
        (TrainConfig, {"eval_every": -1}, "train.eval_every=-1"),
        (TrainConfig, {"evals_per_epoch": 0}, "train.evals_per_epoch=0"),
        (TrainConfig, {"checkpoint_every": 0}, "train.checkpoint_every=0"),
        (TrainConfig, {"log_every": 0}, "train.log_every=0"),
        (TrainConfig, {"accumulate": 0}, "train.accumulate=0"),
        (TrainConfig, {"precision": "fp16"}, "train.precision=fp16"),
        (TrainConfig, {"backend": "cuda"}, "train.backend=cuda"),
        (TrainConfig, {"resume": "latest", "overwrite": True}, "train.resume=latest"),
        (DataConfig, {**DATA, "batch_size": 0}, "data.batch_size=0"),
        (DataConfig, {**DATA, "eval_batch_size": -3}, "data.eval_batch_size=-3"),
        (DataConfig, {**DATA, "raw": "a", "raw_train": "b"}, "data.raw_train"),
        (DataConfig, {**DATA, "raw_test": "a"}, "data.raw_train"),
        (DataConfig, {**DATA, "raw": 11}, "data.raw=11"),
        (DataConfig, {**DATA, "raw_train": ["a", 7]}, "data.raw_train="),
        (DataConfig, {**DATA, "raw": "a", "synthetic": SyntheticConfig()}, "data.raw"),
        (LaunchConfig, {"nproc": 0}, "launch.nproc=0"),
        (LaunchConfig, {"device": "cuda"}, "launch.device=cuda"),
        (LaunchConfig, {"num_threads": 0}, "launch.num_threads=0"),
        (ScoreDataConfig, {"batch_size": 0}, "data.batch_size=0"),
        (ScoreDataConfig, {"raw": 5.0}, "data.raw=5.0"),
        (ScoreRun, {}, "run="),
        (ScoreRun, {"run": "r", "part": "dev"}, "part=dev"),
        (ScoreRun, {"run": "r", "part": "valid", "data": ScoreDataConfig(raw="a")}, "part=valid"),
        (SyntheticConfig, {"num_train": 0}, "data.synthetic.num_train=0"),
        (SyntheticConfig, {"num_valid": -1}, "data.synthetic.num_valid=-1"),
        (SyntheticConfig, {"cardinality_scale": 0.0}, "data.synthetic.cardinality_scale=0.0"),
        (SyntheticConfig, {"zipf": 1.0}, "data.synthetic.zipf=1.0"),
        (SyntheticConfig, {"label_rate": 1.0}, "data.synthetic.label_rate=1.0"),
        (ModelConfig, {"embedding_dim": 0}, "model.embedding_dim=0"),
        (ModelConfig, {"top_mlp": [8, 0]}, "model.top_mlp[1]=0"),
        (ModelConfig, {"interaction": "fm"}, "model.interaction=fm"),
        (OptimConfig, {"eps": -1.0}, "optim.eps=-1.0"),
        (OptimConfig, {"clip_norm": 0.0}, "optim.clip_norm=0.0"),
        (SparseOptimConfig, {"lr": math.nan}, "optim.sparse.lr=nan"),
        (DenseOptimConfig, {"name": "rowwise_adagrad"}, "optim.dense.name=rowwise_adagrad"),
        (ScheduleConfig, {"warmup_steps": -1}, "optim.schedule.warmup_steps=-1"),
        (RawFormat, {"kind": "json"}, "data.schema.format.kind=json"),
        (RawFormat, {"delimiter": "ab"}, "data.schema.format.delimiter='ab'"),
        (DenseColumn, {"transform": "sqrt"}, "transform=sqrt"),
        (Split, {"kind": "hash"}, "data.schema.split.kind=hash"),
        (Split, {"valid": 0.5, "test": 0.5}, "data.schema.split"),
    ],
)
def test_values_out_of_range_name_their_key(build: Any, values: dict[str, Any], key: str) -> None:
    refused(build, values, key)


def test_a_schema_names_its_key() -> None:
    schema = Schema(
        format=RawFormat(columns=["label", "C1"]), sparse={"C1": SparseColumn(min_count=0)}
    )
    refused(lambda: check_schema(schema), {}, "data.schema.sparse.C1.min_count=0")


def test_more_micro_batches_than_samples_are_refused() -> None:
    refused(
        lambda: TrainRun(
            data=DataConfig(name="d", cache="c", batch_size=3), train=TrainConfig(accumulate=4)
        ),
        {},
        "train.accumulate=4",
    )


@pytest.mark.parametrize(
    ("added", "key"),
    [
        ({"foo": 1}, "foo"),
        ({"optim": {"dense": {"momentum": 0.9}}}, "optim.dense.momentum"),
        ({"data": {"schema": {"sparse": {"C1": {"dim": 8}}}}}, "data.schema.sparse.C1.dim"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(added: dict[str, Any], key: str) -> None:
    """`+key=value` adds it to the composed configuration: it must not be ignored (B22, B43)."""
    composed = OmegaConf.structured(TrainRun)
    composed = OmegaConf.merge(composed, {"data": {**DATA, "schema": {"sparse": {"C1": {}}}}})
    OmegaConf.set_struct(composed, False)

    def add(node: Any, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                add(node[name], value)
            else:
                OmegaConf.set_struct(node, False)
                node._set_item_impl(name, value)

    add(composed, added)
    assert OmegaConf.is_dict(composed)
    refused(lambda: to_config(composed), {}, f"{key}:")  # type: ignore[arg-type]


# ------------------------------------------------------------------ B43: the types of overrides


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("data.root=1_1_1", "data.root='1_1_1'"),
        ("data.root=007", "data.root='007'"),
        ("data.root=1e3", "data.root='1e3'"),
        ("data.root=-1.50", "data.root='-1.50'"),
        ("data.root=true", "data.root='true'"),
        ("+data.root=1_1", "+data.root='1_1'"),
        ("hydra.run.dir=1_1_1", "hydra.run.dir='1_1_1'"),
        ("data.raw=[1_1,b.tsv, 2]", "data.raw=['1_1',b.tsv,'2']"),
        ("data.raw=1_1,2", "data.raw='1_1','2'"),
        ("data.schema.label.positive=[true]", "data.schema.label.positive=['true']"),
        ("data.schema.sparse.C1.table=10", "data.schema.sparse.C1.table='10'"),
        # Numbers stay numbers, and what is no number or is quoted stays as it is.
        ("data.batch_size=1_024", "data.batch_size=1_024"),
        ("optim.dense.lr=1e-3", "optim.dense.lr=1e-3"),
        ("model.top_mlp=[10,20]", "model.top_mlp=[10,20]"),
        ("data.root='1_1'", "data.root='1_1'"),
        ("data.root=null", "data.root=null"),
        ("data.root=a 1", "data.root=a 1"),
        ("data.root=2024-01-01", "data.root=2024-01-01"),
        ("data=7", "data=7"),
        ("no.such.key=7", "no.such.key=7"),
        ("--cfg", "--cfg"),
    ],
)
def test_text_keys_get_text(override: str, kept: str) -> None:
    assert _keep_text("train", override) == kept


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "data.root=1_1_1": "1_1_1",
            "data.cache=no": "no",
            "optim.dense.lr=1e-3": 0.001,
            "optim.sparse.lr=1": 1.0,
            "data.batch_size='64'": 64,
            "data.shuffle=False": False,
            "model.top_mlp=[10,20]": [10, 20],
        },
        {"data.root=007": "007", "data.shuffle='False'": False, "data.batch_size=1_024": 1024},
        {"data.root=1e3": "1e3", "data.shuffle=no": False},
        {"data.root=true": "true", "data.shuffle=off": False},
    ],
)
def test_b43_typed_fields_keep_their_meaning(overrides: dict[str, Any]) -> None:
    config = compose_config("train", *[_keep_text("train", override) for override in overrides])
    for override, value in overrides.items():
        found: Any = config
        for name in override.split("=")[0].split("."):
            found = getattr(found, name)
        assert found == value, override
        assert type(found) is type(value), override


# ------------------------------------------------------------- config.yaml is what the run reads


def round_trip(config: TrainRun, tmp_path: Path) -> TrainRun:
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    return stored_config(path)


@pytest.mark.parametrize("data", ["synthetic", "criteo_kaggle", "criteo_1tb", "adult", "bank"])
def test_the_written_configuration_reads_back_equal(data: str, tmp_path: Path) -> None:
    config = compose_config("train", f"data={data}", *TINY_MODEL)
    assert round_trip(config, tmp_path) == config


# Texts that YAML reads as something else unless they are quoted.
NO_TEXTS = ["no", "y", "NO", "off", "1_1", "007", "1e3", "1.", "0x1f", "12:30:45", "null", "~"]
NO_TEXTS += [
    ".5",
    "-",
    "?",
    "=",
    "<<",
    " a",
    "a ",
    "a: b",
    "#a",
    "'",
    '"',
    "\t",
    "!!x",
    "2024-01-01",
]


def test_texts_of_a_schema_survive_the_written_configuration(tmp_path: Path) -> None:
    """Labels and missing-value texts such as `no`, `1_1` or `12:30:45` stay texts."""
    config = TrainRun(data=DataConfig(name="007", cache="1e3"))
    config.data.schema.format.missing = NO_TEXTS
    config.data.schema.dense = {text: DenseColumn() for text in NO_TEXTS}
    assert round_trip(config, tmp_path) == config


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]))))
def test_any_text_survives_the_written_configuration(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assume(not any("${" in text for text in texts))  # An interpolation, in every configuration.
    path = tmp_path_factory.getbasetemp() / "schema.yaml"
    schema = Schema(label=LabelColumn(positive=texts, negative=[]))
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(schema)))
    loaded = OmegaConf.merge(OmegaConf.structured(Schema), OmegaConf.load(path))
    assert OmegaConf.to_object(loaded) == schema


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"resume": "latest"}, "train.resume=latest"),
        ({"warm_start": WarmStartConfig(path="run")}, "train.warm_start.path=run"),
        ({"checkpoint_async": True}, "train.checkpoint_async=True"),
        ({"profile": True}, "train.profile=True"),
    ],
)
def test_check_tells_which_keys_of_train_it_ignores(train: dict[str, Any], key: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(key)):
        CheckRun(data=DataConfig(name="synthetic"), train=TrainConfig(**train))
