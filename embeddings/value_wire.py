"""The form in which rows and gradients travel: one flat buffer of one type for each rank.

    for each rank:   key space 0: its vectors | key space 1: its vectors | … | gradients of replicas

Where there is one key space and nothing else, the matrix of its vectors is the buffer: no copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embeddings.communicator import Buffers, Communicator, Pending
from embeddings.layout import KeySpace
from embeddings.requests import Request, Service

_WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Sizes = list[list[int]]
"""Per rank the number of values of each key space, then of the replicas' gradients."""


class WireOverflow(ValueError):
    """A value that `sharding.wire` can't hold."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        wire = next(name for name, narrow in _WIRE_DTYPES.items() if narrow == dtype)
        largest = torch.finfo(dtype).max
        said = f"{largest:,.0f}" if largest < 1e6 else f"{largest:.4g}"
        wider = "bf16 or fp32" if dtype == torch.float16 else "fp32"
        super().__init__(
            f"sharding.wire={wire}: {value:g} on the wire exceeds {wire}'s range of ±{said}; set "
            f"sharding.wire={wider}"
        )


class ValueWire:
    """Packs, rounds, sends and unpacks values.

    Args:
        spaces: the key spaces.
        comm: the ranks.
        dtype: type of rows and gradients.
        wire: `fp32`: values travel as they are; `bf16`, `fp16`: rounded.
    """

    def __init__(
        self, spaces: Sequence[KeySpace], comm: Communicator, dtype: torch.dtype, wire: str
    ) -> None:
        self._spaces, self._comm, self._dtype = spaces, comm, dtype
        self.wire_dtype = _WIRE_DTYPES.get(wire, dtype)
        self._buffers = Buffers()

    def sizes(
        self, asked: Sequence[Request | Service | None], num_extra: Sequence[int] | None = None
    ) -> Sizes:
        """Sizes of what was asked, and per rank of what follows it."""
        return [
            [
                *(
                    0 if entry is None else entry.num_vectors[rank] * space.dim
                    for space, entry in zip(self._spaces, asked, strict=True)
                ),
                0 if num_extra is None else num_extra[rank],
            ]
            for rank in range(self._comm.world_size)
        ]

    def begin(
        self,
        kind: str,
        matrices: Sequence[Tensor | None],
        sizes_out: Sizes,
        sizes_in: Sizes,
        extra: Sequence[Tensor] = (),
        scale: float = 1.0,
    ) -> Pending:
        """Issues one all-to-all.

        Args:
            kind: `rows` or `grads`.
            matrices: per key space the vectors, rank after rank; None: none.
            sizes_out: of what is sent.
            sizes_in: of what is received.
            extra: flat values that follow for every other rank.
            scale: factor on the wire, where values are rounded; `unpack` takes it out again.

        Raises:
            WireOverflow: where a value is too large for the wire.
        """
        flat = self._pack(kind, matrices, sizes_out, extra)
        if flat.dtype != self.wire_dtype:
            rounded = (flat if scale == 1.0 else flat * scale).to(self.wire_dtype)
            _check_range(flat, rounded, scale)
            flat = rounded
        splits_out, splits_in = [sum(s) for s in sizes_out], [sum(s) for s in sizes_in]
        recv = self._buffers.get(f"{kind} in", sum(splits_in), self.wire_dtype)
        return self._comm.all_to_all(kind, flat, splits_out, recv, splits_in)

    def unpack(
        self, flat: Tensor, sizes: Sizes, scale: float = 1.0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Per key space the received vectors, `(M, D)`, and per rank what followed; valid until the
        next values of this kind."""
        flat = flat.to(self._dtype)
        if scale != 1.0:
            flat = flat / scale
        if len(self._spaces) == 1 and not any(of_rank[-1] for of_rank in sizes):
            return [flat.view(-1, self._spaces[0].dim)], [flat[:0] for _ in sizes]
        pieces = flat.split([size for of_rank in sizes for size in of_rank])
        stride = len(self._spaces) + 1
        matrices = [
            torch.cat(pieces[index::stride]).view(-1, space.dim)
            for index, space in enumerate(self._spaces)
        ]
        return matrices, list(pieces[stride - 1 :: stride])

    def rounded(self, values: Tensor, scale: float) -> Tensor:
        """Values as the other ranks receive them."""
        if self.wire_dtype == self._dtype:
            return values
        return (values * scale).to(self.wire_dtype).to(self._dtype) / scale

    def _pack(
        self, kind: str, matrices: Sequence[Tensor | None], sizes: Sizes, extra: Sequence[Tensor]
    ) -> Tensor:
        if len(matrices) == 1 and matrices[0] is not None and not extra:
            return matrices[0].reshape(-1)
        flat = self._buffers.get(f"{kind} out", sum(map(sum, sizes)), self._dtype)
        starts = [0] * len(matrices)
        position = 0
        for rank, of_rank in enumerate(sizes):
            for index, matrix in enumerate(matrices):
                size = of_rank[index]
                if matrix is not None and size:
                    values = matrix.reshape(-1)[starts[index] : starts[index] + size]
                    flat[position : position + size] = values
                    starts[index] += size
                    position += size
            if rank != self._comm.rank:
                for part in extra:
                    flat[position : position + part.numel()] = part
                    position += part.numel()
        return flat


def _check_range(values: Tensor, rounded: Tensor, scale: float) -> None:
    """Refuses what the wire's type can't hold: also bf16, whose largest number is below fp32's.
    What wasn't finite before travels: it is told with the loss, which isn't finite either.

    Raises:
        WireOverflow: on the rank that sends.
    """
    if bool(torch.isfinite(rounded).all()):
        return
    lost = values[torch.isfinite(values) & ~torch.isfinite(rounded)]
    if lost.numel():
        raise WireOverflow(float(lost.abs().max()) * scale, rounded.dtype)
