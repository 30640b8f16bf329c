"""The configuration of every verb: dataclasses are the schema, `conf/` holds the chosen values.

Hydra composes and type-checks (`register`), `to_config` turns the result into these dataclasses,
and nothing below `dlrm/__main__.py` knows of Hydra or OmegaConf.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from data.errors import UserError
from data.schema import Schema
from data.synthetic import SyntheticConfig
from dlrm.bench.host_bench_config import HostBenchConfig
from dlrm.bench.network import check_processes, rate_bits_per_s
from dlrm.model import ModelConfig
from dlrm.optim import OptimConfig
from dlrm.sharding import ShardingConfig
from dlrm.torchrun import under_torchrun


@dataclass
class DataConfig:
    """Which data, and in what portions."""

    name: str = MISSING
    """Name of the dataset, for people; `synthetic` is generated."""
    raw: Any = None
    """Raw file, glob, or list of these; the schema's rule splits the rows."""
    raw_train: Any = None
    """Raw files to train on, where the split is given."""
    raw_valid: Any = None
    """Raw files to validate on."""
    raw_test: Any = None
    """Raw files to test on."""
    root: str | None = None
    """Folder of the prepared dataset; null: a folder of its own under `data.cache`."""
    cache: str = MISSING
    """Where prepared datasets go that are given no `data.root`."""
    overwrite: bool = False
    """`dlrm prepare`: replace what `data.root` holds."""
    batch_size: int = 2048
    """Samples of one optimizer step, over all ranks and micro-batches."""
    eval_batch_size: int = 8192
    """Samples of one evaluation batch, over all ranks."""
    shuffle: bool = True
    """Whether an epoch's order is shuffled (see docs/formats.md); false: the raw order."""
    schema: Schema = field(default_factory=Schema)
    """What the raw columns mean."""
    synthetic: SyntheticConfig | None = None
    """Settings of the generator; null for real data."""

    def __post_init__(self) -> None:
        for key, value in (
            ("batch_size", self.batch_size),
            ("eval_batch_size", self.eval_batch_size),
        ):
            if value < 1:
                raise UserError(f"data.{key}={value}: must be at least 1")
        for key in ("raw", "raw_train", "raw_valid", "raw_test"):
            _check_file_names(f"data.{key}", getattr(self, key))
        given = [k for k in ("raw_train", "raw_valid", "raw_test") if getattr(self, k)]
        if self.raw and given:
            raise UserError(f"data.raw and data.{given[0]} are both set; use one way to name files")
        if given and not self.raw_train:
            raise UserError(f"data.{given[0]} is set, but data.raw_train isn't")
        if self.synthetic is not None and (self.raw or given):
            raise UserError("data.raw has no use with data=synthetic; choose data=criteo_kaggle, …")


@dataclass
class WarmStartConfig:
    """How a new run starts from another's model (`train.warm_start.…`); see docs/formats.md."""

    path: str | None = None
    """A checkpoint, or a run's folder, whose latest is taken; null: start values."""
    rows: str = "token"
    """Which row a stored row becomes: `token`: that of the same original token, `index`: that of
    the same number."""
    data_root: str | None = None
    """`token`: folder of the prepared dataset of the other run; null: as recorded."""
    grow: bool = False
    """Take tables of another number of rows too: new rows keep their start values."""
    new_tables: list[str] = field(default_factory=list)
    """Tables that the checkpoint lacks."""
    dropped_tables: list[str] = field(default_factory=list)
    """Tables of the checkpoint that the data lack. One of both lists starts anew."""
    state: bool = True
    """Whether the rows' optimizer state comes along."""
    dense: str = "all"
    """Dense weights: `all`, or only those of a `matching` name and shape, or `none`."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("rows", ("token", "index")),
            ("dense", ("all", "matching", "none")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"train.warm_start.{name}={getattr(self, name)}: must be one of "
                    + ", ".join(allowed)
                )
        for name in ("new_tables", "dropped_tables"):
            given = getattr(self, name)
            if len(set(given)) < len(given):
                raise UserError(f"train.warm_start.{name}={given}: name each table once")
        if self.path in ("latest", "best"):
            raise UserError(
                f"train.warm_start.path={self.path}: name the folder of a checkpoint or of a run "
                "(train.resume goes on with this run's own)"
            )
        for name, default in _defaults(WarmStartConfig).items():
            if getattr(self, name) == default:
                continue
            if self.path is None:
                reason = "train.warm_start.path is null"
            elif name == "data_root" and self.rows == "index":
                reason = "train.warm_start.rows=index needs no dataset"
            else:
                continue
            warnings.warn(
                f"train.warm_start.{name}={getattr(self, name)} is ignored: {reason}", stacklevel=3
            )


@dataclass
class TrainConfig:
    """The loop."""

    epochs: int = 1
    """Passes over the training part."""
    max_steps: int | None = None
    """Stop after that many optimizer steps; null: after the epochs."""
    eval_every: int | None = None
    """Evaluate on the valid part every that many steps; null: `evals_per_epoch` times."""
    evals_per_epoch: int = 4
    """Evaluations on the valid part in an epoch, evenly spaced, the last at its end."""
    checkpoint_every: int | None = None
    """Keep the model every that many steps, besides at each evaluation; null: only then."""
    log_every: int = 50
    """Steps between two lines of metrics.jsonl and of the display."""
    precision: str = "fp32"
    """`fp32`; `bf16`: autocast of the dense network over fp32 weights; `fp64`: for proofs."""
    accumulate: int = 1
    """Micro-batches that a batch is cut into; gradients are summed, then applied once."""
    backend: str = "auto"
    """Kernel of the tables: `torch`, `fbgemm` (one process), or `auto`: torch, faster on CPU."""
    overlap: bool = True
    """Hide what travels between processes behind computation; equal to the bit, on or off."""
    profile: bool = False
    """Profile a few steps: their phases, operators and collectives, and a trace of each rank."""
    profile_steps: int = 5
    """How many."""
    profile_start: int | None = None
    """Number of the first of them, from 2 on, as the one before warms the profiler up; null: step
    10, or earlier, so that they lie in the middle of a short run."""
    checkpoint_async: bool = False
    """Write checkpoints while training goes on, from a copy in memory of rows and state."""
    checkpoint_keep: int = 2
    """The newest checkpoints that are kept, besides the best."""
    resume: str | None = None
    """Go on from a checkpoint: `latest` or `best` of hydra.run.dir, or the path of one, or of a
    run's folder, whose latest is taken; null: start anew."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Start a new run from another run's model, whose tables may differ."""
    overwrite: bool = False
    """Use a run folder that isn't empty; its files are replaced."""

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16", "fp64"):
            raise UserError(f"train.precision={self.precision}: must be fp32, bf16 or fp64")
        if self.backend not in ("auto", "torch", "fbgemm"):
            raise UserError(f"train.backend={self.backend}: must be auto, torch or fbgemm")
        for name in (
            "epochs",
            "max_steps",
            "eval_every",
            "evals_per_epoch",
            "checkpoint_every",
            "checkpoint_keep",
            "log_every",
            "accumulate",
            "profile_steps",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"train.{name}={value}: must be at least 1")
        self._check_profile()
        if self.resume is not None and self.overwrite:
            raise UserError(
                f"train.resume={self.resume} goes on with a run, train.overwrite=true removes it: "
                "set one of them"
            )
        if self.resume is not None and self.warm_start.path is not None:
            raise UserError(
                f"train.resume={self.resume} goes on with a run, train.warm_start.path="
                f"{self.warm_start.path} starts a new one: set one of them (a run that began with "
                "a warm start is resumed without it)"
            )

    def _check_profile(self) -> None:
        if self.profile_start is not None and self.profile_start < 2:
            raise UserError(
                f"train.profile_start={self.profile_start}: must be at least 2, since the step "
                "before it warms the profiler up"
            )
        if not self.profile:
            for name in ("profile_steps", "profile_start"):
                if getattr(self, name) != getattr(TrainConfig, name):
                    warnings.warn(
                        f"train.{name}={getattr(self, name)} is ignored: train.profile is false",
                        stacklevel=4,
                    )


MOST_TIMEOUT_S = 20 * 24 * 3600.0
"""Of `launch.timeout_s`: system calls count milliseconds, in 31 bits."""
TRANSPORTS = ("auto", "shared_memory", "sockets", "gloo")


@dataclass
class LaunchConfig:
    """Processes and devices."""

    nproc: int = 1
    """Worker processes on this host."""
    ranks_per_host: int | None = None
    """Ranks that count as one host for `sharding=table_row_wise`; null: `nproc`."""
    device: str = "cpu"
    """Device of the dense network and the tables: `cpu` or `cuda`; only `cpu` is built so far."""
    transport: str = "auto"
    """How values travel between CPU workers: `shared_memory`, for workers of one host; `sockets`,
    TCP connections of our own; or `gloo`. `auto`: shared memory where all are on one host and no
    network interface is asked for, else sockets, else, with a warning, gloo."""
    num_threads: int | None = None
    """Threads of torch in a worker; null: cores / workers, at least 1, and no more than
    OMP_NUM_THREADS where that is set. Cores are those that the process may run on, or fewer where
    its control group has a quota of CPU time. One process keeps torch's default, within that."""
    timeout_s: float = 300.0
    """A collective that takes longer, or a worker that shows no sign of life for longer, ends the
    run."""

    def __post_init__(self) -> None:
        for name in ("nproc", "ranks_per_host", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"launch.{name}={value}: must be at least 1")
        if not 0 < self.timeout_s < math.inf:
            raise UserError(f"launch.timeout_s={self.timeout_s:g}: must be a number above 0")
        if self.timeout_s > MOST_TIMEOUT_S:
            raise UserError(
                f"launch.timeout_s={self.timeout_s:g}: must be at most {MOST_TIMEOUT_S:,.0f} "
                "(20 days)"
            )
        if self.transport not in TRANSPORTS:
            raise UserError(
                f"launch.transport={self.transport}: must be one of {', '.join(TRANSPORTS)}"
            )
        if self.transport != "auto" and self.nproc == 1 and not under_torchrun():
            warnings.warn(
                f"launch.transport={self.transport} is ignored: there is one process", stacklevel=3
            )
        if self.device not in ("cpu", "cuda"):
            raise UserError(f"launch.device={self.device}: must be cpu or cuda")
        if self.device == "cuda":
            self._check_cuda()
        self._check_hosts()

    def _check_cuda(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UserError("launch.device=cuda: torch finds no GPU here. Set launch.device=cpu")
        if self.nproc > torch.cuda.device_count():
            raise UserError(
                f"launch.nproc={self.nproc} exceeds the {torch.cuda.device_count()} GPUs here: "
                "each worker needs one. Lower launch.nproc or set launch.device=cpu"
            )
        raise UserError("launch.device=cuda: only the CPU is built so far. Set launch.device=cpu")

    def _check_hosts(self) -> None:
        # Under torchrun the number of ranks is torchrun's.
        if self.ranks_per_host is None or under_torchrun():
            return
        if self.nproc % self.ranks_per_host:
            raise UserError(
                f"launch.ranks_per_host={self.ranks_per_host} doesn't divide "
                f"launch.nproc={self.nproc}: hosts of unequal size aren't built"
            )


@dataclass
class TrainRun:
    """`dlrm train`."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    seed: int = 0
    """Of initial weights, tables and the order of samples."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: must be at least 0")
        if self.train.accumulate > self.data.batch_size:
            raise UserError(
                f"train.accumulate={self.train.accumulate} exceeds "
                f"data.batch_size={self.data.batch_size}: a micro-batch needs a sample"
            )
        if not self.reads_host_keys:
            self.sharding.warn_of_ignored_host_keys()

    @property
    def reads_host_keys(self) -> bool:
        """Whether `sharding.host.…` is read though no table is put into host memory."""
        return False


@dataclass
class CheckConfig:
    """What `dlrm check` compares."""

    steps: int = 50
    """Steps on the run's own batches; about a dozen on hand-made batches come on top."""
    mutate: str | None = None
    """Plants a known fault, which the check must find; an unknown name lists them. null: none."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"check.steps={self.steps}: must be at least 1")
        if self.mutate is not None:
            from dlrm.mutations import check_name  # Which imports what imports this.

            check_name(self.mutate)


@dataclass
class CheckRun(TrainRun):
    """`dlrm check`: the configuration of a training run, and how it is checked."""

    check: CheckConfig = field(default_factory=CheckConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        train = self.train
        for key, value in (
            ("train.resume", train.resume),
            ("train.warm_start.path", train.warm_start.path),
            ("train.checkpoint_async", train.checkpoint_async),
            ("train.profile", train.profile),
        ):
            if value:
                warnings.warn(
                    f"{key}={value} is ignored: `dlrm check` trains from start values and keeps "
                    "nothing",
                    stacklevel=3,
                )


@dataclass
class BenchConfig:
    """How `dlrm bench` measures (`bench.…`)."""

    sides: list[str] | None = None
    """What is compared, in the order of a turn; null: this system and all its peers."""
    precisions: list[str] | None = None
    """`train`: every side is measured in each, `[fp32,bf16]`; null: `train.precision`."""
    steps: int = 40
    """`train`, `exchange`, `host`: steps that are measured, in every turn."""
    warmup_steps: int = 10
    """Steps before them that aren't."""
    repeats: int | None = None
    """Turns; null: 3, of `checkpoint` 5."""
    bag_size: int = 1
    """`train`, `exchange`: ids per bag; above 1, bags are joined from one-hot data."""
    eval_samples: int = 65_536
    """`train`: samples of the valid part that every side is evaluated on after its steps, about."""
    logloss_tolerance: float = 0.001
    """`train`: how far the sides' log losses may lie apart in fp32; three times that in bf16."""
    pooled_tolerance: float = 1e-4
    """`exchange`: how far the sides' pooled vectors may lie apart after the same steps."""
    rows: int = 2_000_000
    """`prepare`: raw rows that this system and the reader get."""
    peer_rows: int | None = None
    """`prepare`: how many of them TorchRec gets, which takes long; null: 200,000, or all."""
    table_mib: int = 1024
    """`checkpoint`: MiB of all rows and their optimizer state; tables as Criteo Kaggle's."""
    storm_kills: int = 20
    """`checkpoint`: how often a tiny run is killed and resumed; 0: never."""
    host: HostBenchConfig = field(default_factory=HostBenchConfig)
    """`host`: simulated rates, and the sweep."""
    roofline: bool = True
    """`train`: measure this machine's limits too, and each phase's distance to them."""
    network: str = "loopback"
    """What joins the processes: `loopback`, or a rate that they send at most at, `1gbit`, `10gbit`,
    `100mbit`, in network namespaces, which only root can make."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "repeats",
            "bag_size",
            "eval_samples",
            "rows",
            "peer_rows",
            "table_mib",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"bench.{name}={value}: must be at least 1")
        for name in ("warmup_steps", "storm_kills"):
            if getattr(self, name) < 0:
                raise UserError(f"bench.{name}={getattr(self, name)}: must be at least 0")
        for name in ("logloss_tolerance", "pooled_tolerance"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"bench.{name}={getattr(self, name)}: must be above 0")
        if self.peer_rows is not None and self.peer_rows > self.rows:
            raise UserError(
                f"bench.peer_rows={self.peer_rows} exceeds bench.rows={self.rows}: they are the "
                "first of them"
            )
        for precision in self.precisions or []:
            if precision not in ("fp32", "bf16"):
                raise UserError(f"bench.precisions: {precision}: must be fp32 or bf16")
        for name in ("sides", "precisions"):
            given = getattr(self, name)
            if given is not None and (not given or len(set(given)) < len(given)):
                raise UserError(f"bench.{name}={given}: name at least one, and each once")
        rate_bits_per_s(self.network)


BENCH_KINDS = ("train", "exchange", "prepare", "loader", "checkpoint", "host")


@dataclass
class BenchRun(TrainRun):
    """`dlrm bench`: the configuration of a training run, and how it is measured."""

    kind: str = "train"
    """What is measured: training steps (`train`), the tables alone (`exchange`), the way from raw
    rows to a prepared dataset (`prepare`) or from that to batches (`loader`), saving and loading
    (`checkpoint`), the modes of tables in host memory (`host`). `dlrm bench train` is the same as
    `dlrm bench kind=train`."""
    bench: BenchConfig = field(default_factory=BenchConfig)

    @property
    def reads_host_keys(self) -> bool:
        """`bench host` has tables of its own there."""
        return self.kind == "host"

    @property
    def num_turns(self) -> int:
        """`bench.repeats`, or the kind's default."""
        return self.bench.repeats or (5 if self.kind == "checkpoint" else 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in BENCH_KINDS:
            raise UserError(f"kind={self.kind}: must be one of {', '.join(BENCH_KINDS)}")
        check_processes(self.bench.network, self.launch.nproc)


@dataclass
class PrepareRun:
    """`dlrm prepare`."""

    data: DataConfig = field(default_factory=DataConfig)


@dataclass
class ScoreDataConfig:
    """What an existing model is applied to."""

    raw: Any = None
    """Raw file, glob or list; null: a part of the prepared dataset."""
    root: str | None = None
    """Folder of the prepared dataset that the model was trained on; null: as recorded."""
    batch_size: int = 8192
    """Samples per batch."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"data.batch_size={self.batch_size}: must be at least 1")
        _check_file_names("data.raw", self.raw)


@dataclass
class ScoreRun:
    """`dlrm evaluate` and `dlrm predict`."""

    run: str | None = None
    """Folder of the training run."""
    checkpoint: str = "best"
    """Which of the run's models: `best`, `latest`, or the path of a checkpoint."""
    part: str = "test"
    """Part of the prepared dataset: `train`, `valid` or `test`; no meaning with `data.raw`."""
    out: str | None = None
    """`dlrm predict`: the parquet file to write; null: predictions.parquet in the output folder."""
    data: ScoreDataConfig = field(default_factory=ScoreDataConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """Where the tables go now; it needn't be where they were trained."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        if self.run is None:
            raise UserError("run= is missing: name the folder of a training run, run=outputs/…")
        if self.part not in ("train", "valid", "test"):
            raise UserError(f"part={self.part}: must be train, valid or test")
        if self.part != "test" and self.data.raw is not None:
            raise UserError(f"part={self.part} has no meaning with data.raw; leave one out")


@dataclass
class ExportDataConfig:
    """The dataset of the run whose model is exported."""

    root: str | None = None
    """Folder of the prepared dataset that the model was trained on; null: as recorded."""
    batch_size: int = 8192
    """Samples per batch where predictions are compared."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"data.batch_size={self.batch_size}: must be at least 1")


@dataclass
class ExportConfig:
    """What `dlrm export` writes (`export.…`)."""

    what: str = "tables"
    """`tables`: rows with their tokens. `model`: the whole model through torch.export.
    `quantized`: tables of int8 values with a scale and a bias per row, through fbgemm."""
    tables: list[str] | None = None
    """`tables`, `quantized`: the tables to write; null: all."""
    format: str | None = None
    """`tables`: `parquet` (null) or `npy`; `quantized` has `npy` alone, `model` none."""
    out: str | None = None
    """Folder to write to, new or empty; null: the output folder."""
    samples: int = 16_384
    """`model`: so many rows of `part`, the first, are scored both ways and compared."""

    def __post_init__(self) -> None:
        formats = {"tables": ("parquet", "npy"), "model": (), "quantized": ("npy",)}
        if self.what not in formats:
            raise UserError(f"export.what={self.what}: must be one of {', '.join(formats)}")
        if self.format is not None and self.format not in formats[self.what]:
            known = " or ".join(formats[self.what]) or "left out"
            raise UserError(
                f"export.format={self.format}: with export.what={self.what} it must be {known}"
            )
        if self.tables is not None:
            if self.what == "model":
                raise UserError(
                    f"export.tables={self.tables}: export.what=model writes the whole model; "
                    "leave one of them out"
                )
            if not self.tables or len(set(self.tables)) < len(self.tables):
                raise UserError(f"export.tables={self.tables}: name at least one, and each once")
        if self.samples < 1:
            raise UserError(f"export.samples={self.samples}: must be at least 1")


@dataclass
class ExportRun:
    """`dlrm export`."""

    run: str | None = None
    """Folder of the training run."""
    checkpoint: str = "best"
    """Which of its models: `best`, `latest`, or the path of a checkpoint."""
    part: str = "test"
    """`model`, `quantized`: part of the prepared dataset on which predictions are compared:
    `train`, `valid` or `test`."""
    data: ExportDataConfig = field(default_factory=ExportDataConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        if self.run is None:
            raise UserError("run= is missing: name the folder of a training run, run=outputs/…")
        if self.part not in ("train", "valid", "test"):
            raise UserError(f"part={self.part}: must be train, valid or test")
        what = self.export.what
        given = [
            ("part", self.part, "test", ("model", "quantized")),
            ("data.batch_size", self.data.batch_size, 8192, ("model", "quantized")),
            ("export.samples", self.export.samples, ExportConfig.samples, ("model",)),
        ]
        for key, value, default, used_by in given:
            if value != default and what not in used_by:
                warnings.warn(f"{key}={value} is ignored: export.what={what}", stacklevel=3)


RUN_CONFIGS: dict[str, type] = {
    "prepare": PrepareRun,
    "train": TrainRun,
    "evaluate": ScoreRun,
    "predict": ScoreRun,
    "export": ExportRun,
    "check": CheckRun,
    "bench": BenchRun,
}


def register() -> None:
    """Makes the dataclasses known to Hydra, as `schema/VERB`."""
    store = ConfigStore.instance()
    for verb, run_config in RUN_CONFIGS.items():
        store.store(group="schema", name=verb, node=run_config, package="_global_")


def to_config(composed: DictConfig) -> Any:
    """The dataclass of a composed configuration, checked.

    Raises:
        UserError: for values that can't go together or a key that nothing reads, naming the key.
    """
    config = OmegaConf.to_object(composed)
    for key in _unread_keys(config, ""):
        near = difflib.get_close_matches(key, known_keys(type(config)), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UserError(f"{key}: there is no such key, and `+` can't add one{hint}")
    return config


def known_keys(run_config: type) -> list[str]:
    """Every key of a verb's configuration, groups of keys too."""

    def walk(node: Any, prefix: str) -> list[str]:
        keys = []
        for key in node:
            name = f"{prefix}{key}"
            keys.append(name)
            if OmegaConf.is_missing(node, key):
                continue
            if OmegaConf.is_dict(node[key]):
                keys += walk(node[key], f"{name}.")
        return keys

    return walk(OmegaConf.structured(run_config), "")


def _unread_keys(config: Any, prefix: str) -> Iterator[str]:
    """Keys that `+key=value` added: OmegaConf makes attributes of them that no class declares."""
    if is_dataclass(config):
        declared = {f.name for f in fields(config)}
        for name, value in vars(config).items():
            if name not in declared:
                yield f"{prefix}{name}"
            yield from _unread_keys(value, f"{prefix}{name}.")
    elif isinstance(config, dict):
        for name, value in config.items():
            yield from _unread_keys(value, f"{prefix}{name}.")


def _defaults(config: type) -> dict[str, Any]:
    """The value that each field has when it isn't given."""
    return {
        f.name: f.default if f.default_factory is NO_DEFAULT else f.default_factory()
        for f in fields(config)
    }


def _check_file_names(key: str, value: Any) -> None:
    """Refuses what can't name raw files (these keys are text or a list of texts)."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name is not None and not isinstance(name, str):
            raise UserError(f"{key}={value}: must be a file name, a glob or a list of these")
