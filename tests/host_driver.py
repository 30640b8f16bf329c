"""Drives `HostTables` alone, step by step, and makes what its rows and states must come to.

Distinct keys per key space and a gradient that is an elementwise function of the rows: no lookup,
exchange or model lies between a record that went astray and the assertion that finds it. Needs no
pytest, so that a machine without it can run it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings import FeatureConfig, Plan, RowOptimizerConfig, RowStore, SingleProcess, TableConfig
from embeddings.host.executor import Executor
from embeddings.host.host_tables import HostSettings, HostTables, StagedPlan
from embeddings.layout import KeySpace, build_key_spaces
from embeddings.plan import single_process_plan
from embeddings.requests import HotPart
from embeddings.row_update import update_in_place
from embeddings.table_group import local_groups

Int64Array = npt.NDArray[np.int64]
StepKeys = Sequence[Int64Array]
"""Per key space the distinct keys of a step, ascending."""

SEED = 3
LEARNING_RATE = 0.05
# Two key spaces, of dims 8 and 5; tables of one row, and small ones beside large ones.
TABLES = (
    TableConfig("user", 400, 8),
    TableConfig("shop", 150, 5),
    TableConfig("item", 90, 8),
    TableConfig("flag", 1, 5),
)


@dataclass(eq=False)
class Outcome:
    """Rows and states, by the array's name, and what each step looked up, in order.

    Attributes:
        arrays: weights and states of each group.
        looked_up: per step and key space the cold rows, then the hot ones.
    """

    arrays: dict[str, Tensor] = field(default_factory=dict)
    looked_up: list[Tensor] = field(default_factory=list)


def optimizer_of(name: str) -> RowOptimizerConfig:
    """A rule with weight decay, which reads the rows once more."""
    return RowOptimizerConfig(name=name, weight_decay=0.01)  # type: ignore[arg-type]


def build_store(
    optimizer: RowOptimizerConfig,
    dtype: torch.dtype = torch.float64,
    tables: Sequence[TableConfig] = TABLES,
) -> tuple[RowStore, tuple[KeySpace, ...], tuple[FeatureConfig, ...]]:
    """A store of one process whose tables are all in host memory, and its key spaces."""
    plan = single_process_plan(tables)
    plan = Plan(1, tuple(replace(shard, memory="host") for shard in plan.shards), plan.exchange)
    features = tuple(FeatureConfig(table.name, table.name) for table in tables)
    groups = local_groups(plan, rank=0, dtype=dtype, optimizer=optimizer.name)
    store = RowStore(tables, groups, optimizer, seed=SEED, dtype=dtype)
    return store, build_key_spaces(plan, tables, features, [groups]), features


def build_tables(
    store: RowStore,
    spaces: Sequence[KeySpace],
    features: Sequence[FeatureConfig],
    executor: Executor,
    settings: HostSettings,
    hot_share: float,
) -> HostTables:
    """The host tables over a store, with the first rows of each key space hot."""
    dtype = store.groups[0].dtype
    tables = HostTables(spaces, features, store, SingleProcess(), executor, settings, dtype)
    tables.choose_hot(
        {
            index: np.arange(int(hot_share * int(space.bases[-1])), dtype=np.int64)
            for index, space in tables.spaces.items()
        }
    )
    return tables


def settings_of(window: int, batch_rows: int = 4) -> HostSettings:
    """`window` steps ahead; by default the buffers begin too small, and grow."""
    if window:
        return HostSettings(mode="lookahead", lookahead=window, batch_rows=batch_rows)
    return HostSettings(mode="gather", batch_rows=batch_rows)


def draw_keys(spaces: Sequence[KeySpace], num_steps: int, seed: int = 0) -> list[StepKeys]:
    """Skewed keys, so that neighbouring steps share many; a few steps have none in a space."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        keys = []
        for space in spaces:
            num_rows = int(space.bases[-1])
            num_draws = 0 if rng.random() < 0.1 else int(rng.integers(1, 120))
            keys.append(np.unique((rng.random(num_draws) ** 2 * num_rows).astype(np.int64)))
        steps.append(keys)
    return steps


def gradient_of(rows_KD: Tensor, keys_K: Int64Array, step: int) -> Tensor:
    """A gradient per row: a product and a sum of single numbers, which every device rounds alike.

    It depends on the row's value, so a stale record isn't made up for by a right update.
    """
    factors_K = ((keys_K * 2_654_435_761 + 97 * step) % 1_009) / 1_009.0 - 0.5
    factors_K1 = torch.from_numpy(factors_K)[:, None].to(rows_KD.dtype).to(rows_KD.device)
    return rows_KD.mul(0.5).add(factors_K1)


@dataclass(frozen=True, eq=False)
class _Planned:
    keys: StepKeys
    parts: Mapping[int, HotPart]
    plan: StagedPlan

    def cold(self, index: int) -> Int64Array:
        return self.keys[index][self.parts[index].cold_K.numpy()]

    def hot(self, index: int) -> Int64Array:
        return self.keys[index][self.parts[index].hot_K.numpy()]


def drive(
    tables: HostTables,
    store: RowStore,
    steps: Sequence[StepKeys],
    *,
    before_compute: Callable[[], None] = lambda: None,
    between: Callable[[int], None] = lambda step: None,
    drop_before: Collection[int] = (),
) -> Outcome:
    """Trains some steps with the window that the settings say, and settles.

    The compute isn't waited for before the end, so on a GPU it runs behind the host.

    Args:
        tables: the tables.
        store: their rows.
        steps: what each step looks up.
        before_compute: called when a step's rows are about to be looked up, and once more before
            the update.
        between: called before each step; may read rows, not drop staged ones.
        drop_before: steps before which what is staged is forgotten and staged anew.
    """
    outcome = Outcome()
    staged: deque[_Planned] = deque()
    upcoming = iter(steps)
    for step in range(len(steps)):
        between(step)
        if step in drop_before:
            tables.drop_staged()
            staged = deque(_stage(tables, planned.keys) for planned in staged)
        while len(staged) <= tables.settings.window:
            keys = next(upcoming, None)
            if keys is None:
                break
            staged.append(_stage(tables, keys))
        _compute(tables, store, staged.popleft(), step, before_compute, outcome)
    tables.settle()
    outcome.looked_up = [rows_KD.cpu() for rows_KD in outcome.looked_up]
    outcome.arrays = {name: array.clone() for name, array in arrays_of(store).items()}
    tables.close()
    return outcome


def _stage(tables: HostTables, keys: StepKeys) -> _Planned:
    parts = {index: tables.split(index, keys[index]) for index in tables.spaces}
    planned = _Planned(keys, parts, StagedPlan())
    tables.stage([(planned.plan, [planned.cold(index) for index in tables.spaces])])
    return planned


def _compute(
    tables: HostTables,
    store: RowStore,
    planned: _Planned,
    step: int,
    before_compute: Callable[[], None],
    outcome: Outcome,
) -> None:
    before_compute()
    gradients: list[tuple[int, Tensor, Tensor]] = []
    for index, space in tables.spaces.items():
        group = space.group_of_rank[0]
        assert group is not None
        cold_K, slots_K = planned.cold(index), planned.parts[index].slots_K
        cold_KD = tables.rows(index, planned.plan)
        hot_KD = tables.hot_rows(index, slots_K)
        outcome.looked_up += [cold_KD, hot_KD]
        gradients.append((group, torch.from_numpy(cold_K), gradient_of(cold_KD, cold_K, step)))
        hot_grads_KD = gradient_of(hot_KD, planned.hot(index), step)
        gradients.append((tables.hot_group[index], slots_K, hot_grads_KD))
    before_compute()
    store.begin_step()
    tables.begin_update()
    for group, keys_K, grads_KD in gradients:
        tables.update(group, keys_K, grads_KD, LEARNING_RATE)
    tables.retire()


# ---------------------------------------------------------------------------- what it must come to


def expected_by_store(
    store: RowStore, spaces: Sequence[KeySpace], steps: Sequence[StepKeys], hot_share: float
) -> Outcome:
    """The same steps by `RowStore.apply` alone, on the CPU."""

    def apply(group: int, keys_K: Tensor, grads_KD: Tensor) -> None:
        store.apply(group, keys_K, grads_KD, LEARNING_RATE)

    outcome = _expect(store, spaces, steps, hot_share, store.gather, apply)
    outcome.arrays = arrays_of(store)
    return outcome


def expected_on_device(
    store: RowStore,
    spaces: Sequence[KeySpace],
    steps: Sequence[StepKeys],
    hot_share: float,
    device: torch.device,
) -> Outcome:
    """The same steps on whole tables in a device's memory: the same operators there, so the bits
    have to be equal; only `store`'s step count is used up."""
    weights = {g: store.weights(g).to(device) for g in range(len(store.groups))}
    states = {g: {n: s.to(device) for n, s in store.state(g).items()} for g in weights}

    def gather(group: int, keys_K: Tensor) -> Tensor:
        return weights[group].index_select(0, keys_K.to(device))

    def apply(group: int, keys_K: Tensor, grads_KD: Tensor) -> None:
        update_in_place(
            store.optimizer,
            weights[group],
            states[group],
            keys_K.to(device),
            grads_KD,
            lr=LEARNING_RATE,
            num_steps=store.num_steps,
        )

    outcome = _expect(store, spaces, steps, hot_share, gather, apply)
    outcome.looked_up = [rows_KD.cpu() for rows_KD in outcome.looked_up]
    for group, rows_RD in weights.items():
        outcome.arrays[f"group {group} weight"] = rows_RD.cpu()
        for name, state in states[group].items():
            outcome.arrays[f"group {group} {name}"] = state.cpu()
    return outcome


def _expect(
    store: RowStore,
    spaces: Sequence[KeySpace],
    steps: Sequence[StepKeys],
    hot_share: float,
    gather: Callable[[int, Tensor], Tensor],
    apply: Callable[[int, Tensor, Tensor], None],
) -> Outcome:
    outcome = Outcome()
    for step, step_keys in enumerate(steps):
        gradients = []
        for space, keys_K in zip(spaces, step_keys, strict=True):
            group = space.group_of_rank[0]
            assert group is not None
            num_hot = int(hot_share * int(space.bases[-1]))
            for part_K in (keys_K[keys_K >= num_hot], keys_K[keys_K < num_hot]):
                rows_KD = gather(group, torch.from_numpy(part_K))
                outcome.looked_up.append(rows_KD)
                grads_KD = gradient_of(rows_KD, part_K, step)
                gradients.append((group, torch.from_numpy(part_K), grads_KD))
        store.begin_step()
        for group, part, grads_KD in gradients:
            if part.numel():
                apply(group, part, grads_KD)
    return outcome


def arrays_of(store: RowStore) -> dict[str, Tensor]:
    """Weights and states of a store by name; its own memory."""
    arrays = {}
    for group in range(len(store.groups)):
        arrays[f"group {group} weight"] = store.weights(group)
        for name, state in store.state(group).items():
            arrays[f"group {group} {name}"] = state
    return arrays


def differences(found: Outcome, expected: Outcome, tolerance: float = 0.0) -> list[str]:
    """What differs, a line each, the earliest first; empty where nothing does.

    Args:
        found: of `drive`.
        expected: what it must come to.
        tolerance: relative and absolute; 0: to the bit.
    """
    pairs = [
        (f"lookup {number}", mine, theirs)
        for number, (mine, theirs) in enumerate(
            zip(found.looked_up, expected.looked_up, strict=True)
        )
    ]
    assert found.arrays.keys() == expected.arrays.keys()
    pairs += [(name, found.arrays[name], expected.arrays[name]) for name in expected.arrays]
    lines = []
    for name, mine, theirs in pairs:
        if mine.shape != theirs.shape:
            lines.append(f"{name}: shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}")
        elif tolerance and not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance):
            lines.append(f"{name}: off by up to {(mine - theirs).abs().max().item():.3g}")
        elif not tolerance and not torch.equal(mine, theirs):
            num_rows = int((mine != theirs).any(dim=1).sum())
            lines.append(f"{name}: {num_rows} of {mine.shape[0]} rows differ")
    return lines
