"""A small model with everything that a checkpoint holds, on one rank; for tests of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlrm.checkpoint import Checkpoints, Contents, Progress
from dlrm.model_digest import model_digest
from embeddings import Plan, RowOptimizerConfig, ShardedEmbeddings, TableConfig
from embeddings.communicator import Communicator
from tests.sharding_cases import TABLES, Model, build

DENSE_OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}


@dataclass
class Part:
    """One rank's part of a run: tables, dense network and its optimizer."""

    embeddings: ShardedEmbeddings
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def comm(self) -> Communicator:
        return self.embeddings.comm

    def digest(self) -> str:
        """Called by all ranks."""
        return model_digest(self.model, self.embeddings)

    def contents(self, step: int, **more: Any) -> Contents:
        progress = more.pop("progress", Progress(step))
        return Contents.of(progress, self.model, self.embeddings, self.optimizer, **more)

    def save(self, checkpoints: Checkpoints, step: int, *, is_best: bool = False) -> None:
        """Called by all ranks."""
        checkpoints.save(self.contents(step), self.comm, is_best=is_best)

    def fill(self, seed: int) -> None:
        """Gives all that training changes other values, which depend on the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        store = self.embeddings.store
        store.num_steps = seed
        for table in self.embeddings.tables:
            for name, width in {"weight": table.dim, **store.state_widths(table.name)}.items():
                values = torch.rand(table.rows, width, dtype=torch.float64, generator=generator)
                store.write(table.name, 0, {name: values.to(self.embeddings.dtype)})
        start_dense(self.model, seed)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        for _ in range(2):
            self.dense_step(generator)

    def dense_step(self, generator: torch.Generator) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(5, 3, generator=generator)).square().mean().backward()
        self.optimizer.step()


def dense_model(width: int = 4) -> nn.Module:
    """With parameters, and with buffers: one of them a whole number."""
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    start_dense(model, seed=1)
    return model


@torch.no_grad()
def start_dense(model: nn.Module, seed: int) -> None:
    """Start values from a generator of its own: ranks as threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator).add_(0.5))


def make_part(
    comm: Communicator,
    plan: Plan,
    rule: Any = "adam",
    dtype: torch.dtype = torch.float32,
    tables: tuple[TableConfig, ...] = TABLES,
    *,
    width: int = 4,
) -> Part:
    """A fresh model; `rule` for tables and dense network."""
    names = {table.name for table in tables}
    features = tuple(f for f in Model(RowOptimizerConfig()).features if f.table in names)
    embeddings = build(comm, Model(RowOptimizerConfig(rule), tables, features), plan, dtype)
    model = dense_model(width)
    return Part(embeddings, model, DENSE_OPTIMIZERS[rule](model.parameters(), lr=0.1))
