"""Dense gradients are summed over ranks, all of them, in one order, whatever their buckets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlrm import dense_reducer
from dlrm.dense_reducer import DenseReducer
from embeddings.communicator import Pending, SingleProcess
from tests.thread_ranks import ThreadRank, run_ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]

SAMPLES = 9


def build_model() -> nn.Sequential:
    """Parameters of 12, 4, 20, 5, 5 and 1 elements, in the order of the forward pass."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def inputs_of(rank: int, world_size: int, num_samples: int = SAMPLES) -> Tensor:
    """Rank 0 has none; the others share them unevenly."""
    values = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(2))
    cuts = [0, 0, *(num_samples * i * i // (world_size - 1) ** 2 for i in range(1, world_size))]
    return values[cuts[rank] : cuts[rank + 1]]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """This rank's share of a mean."""
    return model(inputs.to(next(model.parameters()).dtype)).square().sum() / SAMPLES


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
    return found


def step(
    comm: ThreadRank, *, overlap: bool, dtype: torch.dtype = torch.float64, num_steps: int = 1
) -> tuple[float, list[Tensor], list[tuple[int, bool]]]:
    """(summed loss, summed gradients, size of each collective and whether it came in backward)."""
    model = build_model().to(dtype)
    issued: list[tuple[int, bool]] = []
    is_in_backward = False
    all_reduce = comm.all_reduce

    def recording(kind: str, values: Tensor) -> Pending:
        assert kind == "dense"
        issued.append((values.numel(), is_in_backward))
        return all_reduce(kind, values)

    comm.all_reduce = recording  # type: ignore[method-assign]
    reducer = DenseReducer(list(model.parameters()), comm, overlap=overlap)
    loss_sum = 0.0
    for _ in range(num_steps):
        model.zero_grad()
        loss = loss_of(model, inputs_of(comm.rank, comm.world_size))
        reducer.begin(float(loss.detach()))
        is_in_backward = True
        loss.backward()
        is_in_backward = False
        loss_sum = reducer.loss()
        reducer.finish()
    assert len(issued) == num_steps * reducer.num_buckets
    return loss_sum, gradients(model), issued


@pytest.mark.parametrize("bucket_bytes", [1, 100, 200, 1 << 20])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_and_loss_are_sums_over_ranks(
    world_size: int, overlap: bool, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one process has them of all samples, although rank 0 has none; a second step, too."""
    monkeypatch.setattr(dense_reducer, "BUCKET_BYTES", bucket_bytes)
    model = build_model().double()
    loss = loss_of(model, inputs_of(1, 2))
    loss.backward()
    ranks = run_ranks(world_size, lambda comm: step(comm, overlap=overlap, num_steps=2))
    for loss_sum, found, _ in ranks:
        assert loss_sum == pytest.approx(float(loss.detach()), rel=1e-13)
        for grad, expected in zip(found, gradients(model), strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


def test_buckets_go_in_the_order_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's first; each as soon as it is full, but for those that wait for others. All
    elements, the loss and the flag that ends a run travel once."""
    monkeypatch.setattr(dense_reducer, "BUCKET_BYTES", 100)  # 13 fp64 numbers or more
    sizes = [1 + 5 + 5 + 20 + 2, 4 + 12]
    for overlap in (True, False):
        ranks = run_ranks(3, lambda comm, on=overlap: step(comm, overlap=on))
        for *_, issued in ranks:
            assert issued == [(size, overlap) for size in sizes]


def test_neither_overlap_nor_buckets_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for bucket_bytes in (1, 90, 1 << 20):
        monkeypatch.setattr(dense_reducer, "BUCKET_BYTES", bucket_bytes)
        for overlap in (True, False):
            found += run_ranks(
                3, lambda comm, on=overlap: step(comm, overlap=on, dtype=torch.float32)
            )
    loss_sum, first, _ = found[0]
    for other_sum, other, _ in found[1:]:
        assert other_sum == loss_sum
        assert all(torch.equal(a, b) for a, b in zip(other, first, strict=True))


def test_what_travels_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One collective per bucket; a ring's `2 (W-1)/W` of the bytes of gradients, loss and flag."""
    monkeypatch.setattr(dense_reducer, "BUCKET_BYTES", 100)

    def count(comm: ThreadRank) -> tuple[int, int]:
        step(comm, overlap=True)
        counters = comm.counters
        assert {kind for kind, n in counters.num_collectives.items() if n} == {"dense"}
        return counters.num_collectives["dense"], counters.sent_bytes["dense"]

    num_bytes = [8 * 33, 8 * 16]
    assert run_ranks(4, count) == [(2, sum(2 * 3 * size // 4 for size in num_bytes))] * 4


def test_only_the_last_backward_of_a_step_is_sent() -> None:
    """Micro-batches add up in `grad`; the sums of both travel, once."""

    def accumulate(comm: ThreadRank) -> tuple[list[Tensor], int]:
        model = build_model().double()
        reducer = DenseReducer(list(model.parameters()), comm, overlap=True)
        inputs = inputs_of(comm.rank, comm.world_size)
        half = len(inputs) // 2
        loss_of(model, inputs[:half]).backward()
        assert comm.counters.num_collectives["dense"] == 0
        last = loss_of(model, inputs[half:])
        reducer.begin(0.0)
        last.backward()
        reducer.loss()
        reducer.finish()
        return gradients(model), comm.counters.num_collectives["dense"]

    whole = run_ranks(3, lambda comm: step(comm, overlap=True))[0][1]
    for found, num_collectives in run_ranks(3, accumulate):
        assert num_collectives == 1
        for grad, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


def test_a_loss_that_is_not_finite_on_one_rank_reaches_all() -> None:
    def sum_losses(comm: ThreadRank) -> float:
        model = build_model()
        reducer = DenseReducer(list(model.parameters()), comm, overlap=True)
        reducer.begin(math.nan if comm.rank == 1 else 0.5)
        loss_of(model, inputs_of(comm.rank, comm.world_size)).backward()
        return reducer.loss()

    assert all(math.isnan(loss) for loss in run_ranks(3, sum_losses))


def test_one_process_copies_and_sends_nothing() -> None:
    model = build_model()
    reducer = DenseReducer(list(model.parameters()), SingleProcess(), overlap=True)
    reducer.begin(0.1)
    loss_of(model, inputs_of(1, 2)).backward()
    before = [
        (parameter.grad, grad)
        for parameter, grad in zip(model.parameters(), gradients(model), strict=True)
    ]
    assert reducer.num_buckets == 0
    assert reducer.loss() == 0.1  # In fp64, though the model is fp32.
    for parameter, (same, values) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is same
        assert same is not None
        assert torch.equal(same, values)


# --------------------------------------------------------------------------------------- misuse


def two_ranks(work: Any, *, overlap: bool = True) -> None:
    """`work(model, reducer, loss)` on two ranks must fail an assertion on each."""

    def run(comm: ThreadRank) -> None:
        model = build_model()
        reducer = DenseReducer(list(model.parameters()), comm, overlap=overlap)
        with pytest.raises(AssertionError):
            work(model, reducer, loss_of(model, inputs_of(comm.rank, comm.world_size)))

    run_ranks(2, run)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_without_gradient_is_noticed(overlap: bool) -> None:
    """Else the ranks' sums would be those of an earlier step."""

    def freeze_one(model: nn.Sequential, reducer: DenseReducer, loss: Tensor) -> None:
        reducer.begin(0.0)
        torch.autograd.backward(loss, inputs=list(model.parameters())[1:])
        reducer.loss()

    two_ranks(freeze_one, overlap=overlap)


def test_the_loss_of_no_step_is_noticed() -> None:
    def forget(model: nn.Sequential, reducer: DenseReducer, loss: Tensor) -> None:
        loss.backward()
        reducer.loss()

    two_ranks(forget)


def test_finish_before_the_loss_is_noticed() -> None:
    """The last buckets may not even be on their way."""

    def hurry(model: nn.Sequential, reducer: DenseReducer, loss: Tensor) -> None:
        reducer.begin(0.0)
        loss.backward()
        reducer.finish()

    two_ranks(hurry)


def test_the_loss_is_there_before_the_last_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rows couldn't be updated meanwhile; nor is a sum waited for twice."""
    monkeypatch.setattr(dense_reducer, "BUCKET_BYTES", 100)

    def run(comm: ThreadRank) -> tuple[float, list[int]]:
        model = build_model()
        waited: list[int] = []
        all_reduce = comm.all_reduce

        def recording(kind: str, values: Tensor) -> Pending:
            pending = all_reduce(kind, values)
            size = values.numel()
            return Pending(values, lambda: (waited.append(size), pending.wait())[0])

        comm.all_reduce = recording  # type: ignore[method-assign]
        reducer = DenseReducer(list(model.parameters()), comm, overlap=True)
        reducer.begin(0.5 + comm.rank)
        loss_of(model, inputs_of(comm.rank, comm.world_size)).backward()
        loss_sum = reducer.loss()
        assert waited == [33]
        reducer.finish()
        reducer.finish()
        return loss_sum, waited

    assert run_ranks(2, run) == [(2.0, [33, 16])] * 2


@pytest.mark.parametrize("overlap", [True, False])
def test_a_second_backward_before_the_end_is_noticed(overlap: bool) -> None:
    """The first one's sums are on their way already."""

    def twice(model: nn.Sequential, reducer: DenseReducer, loss: Tensor) -> None:
        reducer.begin(0.0)
        loss.backward(retain_graph=True)
        loss.backward()
        reducer.loss()

    two_ranks(twice, overlap=overlap)
