"""`model_digest`: one number for a whole model, wherever its rows are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torch import nn

from embeddings.sharded import ShardedEmbeddings
from embeddings.store import WEIGHT

_BLOCK_ROWS = 65_536


def model_digest(
    model: nn.Module, embeddings: ShardedEmbeddings, beat: Callable[[], None] = lambda: None
) -> str:
    """SHA-256 of every row, its state and the dense weights, in canonical order.

    Tables by name; of each, blocks of 65,536 rows; of each block, the weights and then each state
    by name; last, the dense weights by name. So it doesn't depend on where rows live. Called by all
    ranks, returned on all; rows travel to the first rank block by block.
    """
    digest = hashlib.sha256()
    for table in sorted(embeddings.tables, key=lambda t: t.name):
        digest.update(f"{table.name} {table.rows} {table.dim}".encode())
        for start in range(0, table.rows, _BLOCK_ROWS):
            beat()
            stop = min(start + _BLOCK_ROWS, table.rows)
            values = embeddings.read(table.name, start, stop)
            if values is None:
                continue
            for name in [WEIGHT, *sorted(set(values) - {WEIGHT})]:
                digest.update(values[name].contiguous().numpy().data)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return str(embeddings.comm.all_gather_object(digest.hexdigest())[0])
