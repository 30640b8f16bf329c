"""The borrower of a group's memory: fbgemm's table-batched embeddings, update inside backward.

`FusedGroup` hands fbgemm the store's own arrays, so the store sees every update at once and fbgemm
every write to the store. It is an optimisation with a narrow field (`why_not_fused`); the torch
backend does everything.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from embeddings.router import GroupPlan
from embeddings.row_optim import RowOptimizerConfig
from embeddings.store import RowStore
from embeddings.table_group import TableGroup

# The pair of releases that loads together, see docs/decisions.md, "Dependencies".
_WORKING_PAIR = "torch==2.13.0 with fbgemm-gpu-cpu==1.8.0"
_TRAINING_MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
_COMMON_MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_common"
_OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}
_BACKWARD_OPERATOR = "split_embedding_backward_codegen_{name}_cpu"
# fbgemm numbers the rows of a table with 32 bits on CPU.
_MAX_ROWS = 2**31 - 2
_NOT_INSTALLED = "(not installed)"


@dataclass(frozen=True)
class FbgemmStatus:
    """Whether fbgemm's training kernels can be used here.

    Attributes:
        available: whether they loaded.
        message: one line: the versions that loaded, or those that didn't and the pair that does.
    """

    available: bool
    message: str


def load_fbgemm() -> FbgemmStatus:
    """Try to import fbgemm's training kernels; never raises for a missing or mismatched library."""
    versions = f"torch {_version('torch')} and {_fbgemm_version()}"
    try:
        _import_fbgemm(_TRAINING_MODULE)
        for name in _OPTIMIZERS:
            getattr(torch.ops.fbgemm, _BACKWARD_OPERATOR.format(name=name))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return FbgemmStatus(
            available=False,
            message=f"{versions} don't load together ({reason}); {_WORKING_PAIR} does",
        )
    return FbgemmStatus(available=True, message=versions)


def why_not_fused(
    groups: Sequence[TableGroup],
    optimizer: RowOptimizerConfig,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    world_size: int = 1,
) -> str | None:
    """Why the fused kernels can't train these groups as configured; None where they can.

    Args:
        groups: every table group of the rank.
        optimizer: rule and constants.
        accumulate: micro-batches per optimizer step (`train.accumulate`).
        clip_norm: bound of the global gradient norm, or None.
        world_size: number of ranks.
    """
    if world_size != 1:
        return "gradients of several processes are summed before the update"
    if optimizer.name not in _OPTIMIZERS:
        return (
            f"optim.sparse.name={optimizer.name} has no fused kernel on CPU; "
            f"{', '.join(_OPTIMIZERS)} have"
        )
    if optimizer.weight_decay:
        return f"optim.sparse.weight_decay={optimizer.weight_decay} needs explicit gradients"
    if accumulate != 1:
        return f"train.accumulate={accumulate} needs gradients summed before the update"
    if clip_norm is not None:
        return f"clipping to a norm of {clip_norm} needs gradients before the update"
    for group in groups:
        name = group.pieces[0].table
        if group.memory == "host":
            return f"table {name!r} is in host memory: its rows come and go in steps"
        if group.dtype != torch.float32:
            return f"the fused kernels are fp32 only, table {name!r} is {group.dtype}"
        if group.dim % 4:
            return f"the fused kernels need dim % 4 = 0, table {name!r} has dim {group.dim}"
        if group.num_rows > _MAX_ROWS:
            return (
                f"the fused kernels count rows with 32 bits, the tables of dim {group.dim} have "
                f"{group.num_rows} rows"
            )
    return None


class FusedGroup:
    """One table group under fbgemm: forward, and a backward that updates the rows.

    The group's flat array is *one* fbgemm table that every feature looks up in, and keys are its
    row numbers. (As one fbgemm table per table of ours, row-wise Adagrad takes another kernel,
    which was 3 times as slow here: 10 against 3 ms for 2,048 × 26 ids, dim 16.)

    fbgemm's autograd node reads the learning rate in forward, before the step's rate is due. So
    lookup runs without autograd, and `backward_and_update` calls the operator that the node itself
    would call.

    Args:
        store: whose memory is borrowed.
        group: index of the group.
        num_features: features that look up in the group, at least 1.

    Raises:
        ValueError: where the kernels can't train the group; ask `why_not_fused` first.
    """

    def __init__(self, store: RowStore, group: int, num_features: int) -> None:
        assert num_features >= 1, "a group that no feature looks up in needs no kernel"
        table_group, self._optimizer = store.groups[group], store.optimizer
        reason = why_not_fused([table_group], self._optimizer)
        if reason is not None:
            raise ValueError(reason)
        # `.data`: fbgemm's parameters are to share the memory but not the version counter, as
        # updates inside backward are meant.
        self._weights = store.weights(group).data.view(-1)
        self._sum = store.state(group)["sum"].data.view(-1) if store.state(group) else None
        buffers = {"weights": self._weights}
        if self._sum is not None:
            buffers["momentum1"] = self._sum
        self._kernel = _build_kernel(table_group, num_features, self._optimizer, buffers)
        self._check_borrowed()

    @property
    def kernel(self) -> Any:
        """The `SplitTableBatchedEmbeddingBagsCodegen` that borrows the store's memory."""
        return self._kernel

    def lookup(self, plan: GroupPlan) -> Tensor:
        """Pooled rows of a batch, `(B, F·D)`, the group's features side by side; no gradient."""
        with torch.no_grad():
            return self._kernel(plan.keys_L, plan.offsets, per_sample_weights=plan.weights_L)

    def backward_and_update(self, plan: GroupPlan, grad_BS: Tensor, lr: float) -> None:
        """Sum the gradients per row and update the rows and their state.

        Args:
            plan: the batch that was looked up.
            grad_BS: fp32 gradient of the result of `lookup`, `(B, F·D)`.
            lr: learning rate of this step.
        """
        if not plan.keys_L.numel():
            return
        kernel, config = self._kernel, self._optimizer
        operator = getattr(torch.ops.fbgemm, _BACKWARD_OPERATOR.format(name=config.name))
        arguments: list[Any] = [
            grad_BS.contiguous(),
            self._weights,
            kernel.weights_placements,
            kernel.weights_offsets,
            kernel.D_offsets,
            kernel.max_D,
            kernel.hash_size_cumsum,
            kernel.total_hash_size_bits,
            plan.keys_L,
            plan.offsets,
            int(kernel.pooling_mode),
            plan.weights_L,
            kernel.stochastic_rounding,
        ]
        if self._sum is not None:
            arguments += [self._sum, kernel.momentum1_placements, kernel.momentum1_offsets]
        arguments.append(torch.tensor(lr, dtype=torch.float32))
        if self._sum is not None:
            arguments.append(config.eps)
        with torch.no_grad():
            operator(*arguments)

    def _check_borrowed(self) -> None:
        borrowed = [(self._kernel.weights_host, self._weights)]
        if self._sum is not None:
            borrowed.append((self._kernel.momentum1_host, self._sum))
        for theirs, ours in borrowed:
            if theirs.data_ptr() != ours.data_ptr():
                raise RuntimeError("fbgemm made a copy of the store's memory")


def _build_kernel(
    group: TableGroup,
    num_features: int,
    optimizer: RowOptimizerConfig,
    buffers: dict[str, Tensor],
) -> Any:
    training, common = _import_fbgemm(_TRAINING_MODULE), _import_fbgemm(_COMMON_MODULE)
    location, device = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(group.num_rows, group.dim, location, device)],
        feature_table_map=[0] * num_features,
        optimizer=getattr(training.OptimType, _OPTIMIZERS[optimizer.name]),
        eps=optimizer.eps,
        # Mixed poolings in one call: a mean is a sum with weights 1 / length, see GroupPlan.
        pooling_mode=common.PoolingMode.SUM,
        # The router has checked the ids against their own table, which is narrower.
        bounds_check_mode=common.BoundsCheckMode.NONE,
        stochastic_rounding=False,
        preallocated_host_buffers=buffers,
    )


def _import_fbgemm(module: str) -> Any:
    with warnings.catch_warnings():
        # The CPU wheel warns of kernels that it doesn't ship (lookup_adam_ssd and the like).
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"fbgemm_gpu\b")
        return importlib.import_module(module)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _NOT_INSTALLED


def _fbgemm_version() -> str:
    """Name and version: the CPU and CUDA builds share an import name but not a package name."""
    found = {name: _version(name) for name in ("fbgemm-gpu-cpu", "fbgemm-gpu")}
    installed = [f"{name} {v}" for name, v in found.items() if v != _NOT_INSTALLED]
    return " and ".join(installed) or f"fbgemm {_NOT_INSTALLED}"
