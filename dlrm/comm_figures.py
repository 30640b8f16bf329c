"""What a run's collectives came to: the `comm` part of result.json."""

from __future__ import annotations

from typing import Any

from embeddings.communicator import Communicator

# Of result.json's names, what each counts.
_BYTES_OF = {
    "ids": ("counts", "ids"),
    "rows": ("rows",),
    "grads": ("grads", "replicas", "squares", "norm"),
    "dense": ("dense",),
}
# All-reduces: the buckets, and at most one for replicas whose gradients go as matrices.
_DENSE_KINDS = ("dense", "replicas")
_TABLE_KINDS = ("counts", "ids", "rows", "grads", "squares", "norm")


def comm_figures(comm: Communicator, num_steps: int) -> dict[str, Any]:
    """Means per step; called by all ranks, the same on each.

    Args:
        comm: its counters are those of the training steps only.
        num_steps: optimizer steps.

    Returns:
        `transport`; `collectives_per_step` for the tables, `dense_collectives_per_step`,
        `bytes_sent_per_step` (mean over ranks of what a rank sends to others), the same as
        `…_max_rank`, and `imbalance`: the tables' bytes of the rank that sends most, over the mean.
    """
    counters = comm.counters
    own = {
        name: sum(counters.sent_bytes[kind] for kind in kinds) / num_steps
        for name, kinds in _BYTES_OF.items()
    }
    of_ranks = comm.all_gather_object(own)
    tables = [rank["ids"] + rank["rows"] + rank["grads"] for rank in of_ranks]
    mean_tables = sum(tables) / len(tables)
    return {
        "transport": comm.transport,
        "collectives_per_step": round(
            sum(counters.num_collectives[kind] for kind in _TABLE_KINDS) / num_steps, 3
        ),
        "dense_collectives_per_step": round(
            sum(counters.num_collectives[kind] for kind in _DENSE_KINDS) / num_steps, 3
        ),
        "bytes_sent_per_step": {
            name: round(sum(rank[name] for rank in of_ranks) / len(of_ranks), 1) for name in own
        },
        "bytes_sent_per_step_max_rank": {
            name: round(max(rank[name] for rank in of_ranks), 1) for name in own
        },
        "imbalance": round(max(tables) / mean_tables, 4) if mean_tables else 1.0,
    }
