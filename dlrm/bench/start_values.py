"""The same start values for all sides."""

from __future__ import annotations

import torch
from torch import Tensor

from data.manifest import Manifest
from dlrm.build import build_model
from dlrm.config import BenchRun
from embeddings.table import TableConfig, fill_uniform


def dense_start_values(config: BenchRun, manifest: Manifest) -> list[Tensor]:
    """Of this system's dense network, in the order of the forward pass."""
    return [parameter.detach() for parameter in build_model(config, manifest).parameters()]


@torch.no_grad()
def fill_table(
    out_RD: Tensor, table: TableConfig, seed: int, *, row_start: int = 0, col_start: int = 0
) -> None:
    """A rectangle of a table, as this system starts it."""
    fill_uniform(
        out_RD,
        seed=seed,
        table_name=table.name,
        row_start=row_start,
        col_start=col_start,
        dim=table.dim,
        bound=table.default_bound,
    )
