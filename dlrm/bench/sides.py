"""What can be measured side by side: names, what builds them, and what they can't do."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from data.errors import UserError
from data.manifest import Manifest
from dlrm.config import BenchRun
from embeddings.machine import available_bytes
from embeddings.row_optim import RowOptimizerConfig, RowOptimizerName, state_widths
from embeddings.table import TableConfig

if TYPE_CHECKING:
    from dlrm.bench.measure import BuildSide

OWN = "dlrm"
FLOOR = "gemm_floor"
ALL_TO_ALL_FLOOR = "all_to_all_floor"
TORCHREC_DATA = "torchrec"
"""TorchRec's own tools for data."""
FLOORS = (FLOOR, ALL_TO_ALL_FLOOR)
TORCHREC = (
    "torchrec_table_wise",
    "torchrec_table_wise_pipelined",
    "torchrec_row_wise",
    "torchrec_row_wise_pipelined",
    "torchrec_mixed",
    "torchrec_mixed_pipelined",
)
EMBEDDING_BAG = "embedding_bag"
SIDES = {
    OWN: "this system, with the configuration's own sharding",
    **{
        name: "TorchRec: fbgemm's fused tables, DistributedModelParallel, an explicit plan"
        + (", TrainPipelineSparseDist" if name.endswith("pipelined") else "")
        for name in TORCHREC
    },
    EMBEDDING_BAG: "nn.EmbeddingBag(sparse=True), torch's optimizers, DistributedDataParallel",
    FLOOR: "the matrix products of the dense network's layers alone, forward and backward",
}
TORCHREC_VERSION = "1.8.0"


def hush_torchrec() -> None:
    """Silences what TorchRec says about itself when it is imported and built; in workers only."""
    for name in ("torch.fx._symbolic_trace", "torchrec.distributed.utils"):
        logging.getLogger(name).disabled = True


def builder(side: str) -> BuildSide:
    """What builds a side, imported only where it is measured."""
    if side in TORCHREC:
        hush_torchrec()
    module = (
        "side_torchrec" if side in TORCHREC else {OWN: "side_dlrm", FLOOR: "side_gemm"}.get(side)
    )
    found = importlib.import_module(f"dlrm.bench.{module or 'side_embedding_bag'}")
    build: BuildSide = found.build
    return build


def default_sides(world_size: int) -> list[str]:
    """All, where each means something of its own: one process has nothing to shard or hide."""
    if world_size == 1:
        return [OWN, "torchrec_table_wise", EMBEDDING_BAG, FLOOR]
    return list(SIDES)


def check_sides(config: BenchRun, sides: list[str]) -> None:
    """Refuses what can't be compared, before anything is measured.

    Raises:
        UserError: naming the key.
    """
    check_names(sides, SIDES)
    peers = [side for side in sides if side not in (OWN, FLOOR)]
    if not peers:
        return
    for key, value, wanted in (
        ("model.interaction", config.model.interaction, "dot"),
        ("model.dot_diagonal", config.model.dot_diagonal, False),
        ("model.table_dims", config.model.table_dims, {}),
        ("train.accumulate", config.train.accumulate, 1),
        ("optim.clip_norm", config.optim.clip_norm, None),
        ("optim.schedule.warmup_steps", config.optim.schedule.warmup_steps, 0),
        ("optim.schedule.decay_steps", config.optim.schedule.decay_steps, 0),
    ):
        if value != wanted:
            raise UserError(
                f"{key}={value}: the peers {', '.join(peers)} are built for {key}={wanted} only; "
                "change it, or leave them out of bench.sides"
            )
    check_row_updates(config, sides)


def check_names(sides: Sequence[str], known: Iterable[str]) -> None:
    """Refuses sides that there aren't.

    Raises:
        UserError: listing those that there are.
    """
    unknown = [side for side in sides if side not in known]
    if unknown:
        raise UserError(f"bench.sides: no side {unknown[0]}; there are {', '.join(known)}")


def data_sides(config: BenchRun, known: Sequence[str]) -> list[str]:
    """The sides of a benchmark of data, in one process: those of `bench.sides`, or all.

    Raises:
        UserError: for several processes, a side that there isn't, or a TorchRec that can't run.
    """
    sides = config.bench.sides or list(known)
    check_names(sides, known)
    if config.launch.nproc > 1:
        raise UserError(
            f"launch.nproc={config.launch.nproc}: `dlrm bench {config.kind}` measures one process; "
            "set launch.nproc=1"
        )
    if TORCHREC_DATA in sides:
        check_torchrec_installed([side for side in sides if side != TORCHREC_DATA], "iopath")
    return sides


def check_row_updates(config: BenchRun, sides: Sequence[str]) -> None:
    """Refuses tables and update rules that a peer doesn't have.

    Raises:
        UserError: naming the key.
    """
    rule, decay = config.optim.sparse.name, config.optim.sparse.weight_decay
    peers = [side for side in sides if side == EMBEDDING_BAG or side in TORCHREC]
    if peers and decay:
        raise UserError(
            f"optim.sparse.weight_decay={decay}: the peers {', '.join(peers)} are built for 0.0 "
            "only; change it, or leave them out of bench.sides"
        )
    if EMBEDDING_BAG in sides and rule not in ("sgd", "adagrad"):
        raise UserError(
            f"optim.sparse.name={rule}: torch has no such optimizer for sparse gradients, so "
            f"{EMBEDDING_BAG} can't be compared; leave it out of bench.sides"
        )
    if any(side in TORCHREC for side in sides):
        _check_torchrec(config, sides)


def check_data(manifest: Manifest, sides: Sequence[str]) -> None:
    """Refuses data that the peers aren't built for: they would train another model.

    Raises:
        UserError: naming what it is.
    """
    peers = [side for side in sides if side == EMBEDDING_BAG or side in TORCHREC]
    if not peers:
        return
    features, schema = manifest.features, manifest.schema
    pooling: dict[str, set[str]] = {}
    for feature in features:
        pooling.setdefault(feature.table, set()).add(feature.pooling)
    for has_it, what in (
        (schema.example_weight is not None, "example weights"),
        (any(f.bag_weights is not None for f in features), "bag weights"),
        (any(len(kinds) > 1 for kinds in pooling.values()), "a table pooled in two ways"),
        (not manifest.dense_columns, "no dense features"),
    ):
        if has_it:
            raise UserError(
                f"the data have {what}, which the peers {', '.join(peers)} aren't built for here; "
                f"choose other data (data=synthetic_full), or leave them out of bench.sides"
            )


def check_memory(config: BenchRun, sides: Sequence[str], tables: Sequence[TableConfig]) -> None:
    """Refuses tables that don't fit: a measurement that swaps or is killed tells nothing.

    Raises:
        UserError: naming the largest side, what it needs and what there is.
    """
    available = available_bytes()
    if available is None:
        return
    optimizer = RowOptimizerConfig(cast(RowOptimizerName, config.optim.sparse.name))
    num_bytes = 4 * sum(
        table.rows * (table.dim + sum(state_widths(optimizer, table.dim).values()))
        for table in tables
    )
    for side in sides:
        copies = config.launch.nproc if side == EMBEDDING_BAG else 1
        if side not in FLOORS and copies * num_bytes > available:
            others = ",".join(other for other in sides if other != side)
            gib = 2**30
            raise UserError(
                f"{side}: its tables and their optimizer state take {copies * num_bytes / gib:.1f} "
                f"GiB in all processes, but {available / gib:.1f} GiB are free here. Lower "
                "model.embedding_dim or data.synthetic.cardinality_scale"
                + (f", or leave it out: bench.sides=[{others}]" if copies > 1 else "")
            )


def check_torchrec_installed(others: Sequence[str], *more: str) -> None:
    """Refuses to compare with a TorchRec that isn't there, or is another one.

    Args:
        others: the sides that can be measured without.
        more: distributions that it needs besides for what is measured.

    Raises:
        UserError: saying how to get it.
    """
    try:
        found = version("torchrec")
        for name in more:
            version(name)
    except PackageNotFoundError as error:
        raise UserError(
            f"bench.sides: {error.name or error} isn't installed. Run `DLRM_EXTRAS=peers "
            f"scripts/dlrm bench …` once, or leave TorchRec out: bench.sides=[{','.join(others)}]"
        ) from None
    if found != TORCHREC_VERSION:
        raise UserError(
            f"bench.sides: torchrec {found} is installed; compared is {TORCHREC_VERSION}, which "
            "goes with this torch. Run `DLRM_EXTRAS=peers scripts/dlrm bench …`"
        )


def _check_torchrec(config: BenchRun, sides: Sequence[str]) -> None:
    others = ",".join(side for side in sides if side not in TORCHREC)
    check_torchrec_installed([side for side in sides if side not in TORCHREC])
    rule = config.optim.sparse.name
    if rule not in ("sgd", "adagrad", "rowwise_adagrad"):
        raise UserError(
            f"optim.sparse.name={rule}: TorchRec has it on GPUs only; leave it out: "
            f"bench.sides=[{others}]"
        )
    if config.model.embedding_dim % 4:
        raise UserError(
            f"model.embedding_dim={config.model.embedding_dim}: TorchRec wants a multiple of 4; "
            f"change it, or leave TorchRec out: bench.sides=[{others}]"
        )
    mixed = [side for side in sides if "mixed" in side]
    if mixed and config.launch.nproc == 1:
        raise UserError(
            f"bench.sides: {mixed[0]} divides the tables among processes; set launch.nproc=2, or "
            "leave it out"
        )
    if mixed and rule == "rowwise_adagrad":
        raise UserError(
            f"optim.sparse.name={rule}: {mixed[0]} replicates small tables, whose rows torch's own "
            "optimizers update, and these don't have it; leave it out of bench.sides"
        )
