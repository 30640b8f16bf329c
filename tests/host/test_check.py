"""`dlrm check` of tables in host memory: right runs pass, and every fault of their way is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm import check_pass
from dlrm.check import CheckFailed, CheckTask, verdict
from dlrm.check_compare import GRADIENTS, ROWS, STATE
from dlrm.check_pass import PassResult
from dlrm.host_mutations import HOST_FAULTS
from dlrm.trainer import Trainer
from tests.check_cases import optimizers, run_on_threads
from tests.host_run_cases import counters_of, host_check_task, in_host, write_baskets

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adam")
MODES = (("gather", 1), ("lookahead", 1), ("lookahead", 2), ("lookahead", 8), ("hotline", 1))
NUM_MADE = 13
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def baskets(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """70 rows: nine batches of 8 an epoch, the last of 6."""
    return write_baskets(tmp_path_factory.mktemp("baskets"), 70)


@pytest.fixture(scope="module")
def run() -> Callable[[CheckTask], tuple[list[PassResult], list[Trainer]]]:
    """Both passes, and the trainers of all ranks."""

    def run_and_keep(task: CheckTask) -> tuple[list[PassResult], list[Trainer]]:
        trainers: list[Trainer] = []

        class Kept(Trainer):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                trainers.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check_pass, "Trainer", Kept)
            return run_on_threads(task), trainers

    return run_and_keep


def assert_rows_of_every_kind(trainers: list[Trainer], num_passes: int) -> None:
    """Of each pass, over its ranks: it compared hot rows, and cold ones on all their ways."""
    world_size = trainers[0].comm.world_size
    assert len(trainers) == num_passes * world_size
    mode = trainers[0].config.sharding.host.mode
    for precision in {trainer.config.train.precision for trainer in trainers}:
        ranks = [counters_of(t) for t in trainers if t.config.train.precision == precision]
        assert len(ranks) == world_size

        def total(name: str, of_ranks: list[Any] = ranks) -> int:
            return sum(getattr(counters, name) for counters in of_ranks)

        assert total("num_hot_lookups") > 0
        assert total("num_fetched") > 0
        assert total("num_written") > 0
        assert (total("num_forwarded") > 0) == (mode == "lookahead")
        assert total("num_cold") == total("num_fetched") + total("num_forwarded")
        assert total("num_cold") == total("num_written") + total("num_kept")
        assert 0 < total("num_hot_samples") < total("num_samples")
    for trainer in trainers:
        assert trainer.embeddings.host is not None
        assert trainer.embeddings.host.num_staged == 0


# ------------------------------------------------------------------------------- what is right


@pytest.fixture(scope="module")
def right(
    baskets: PreparedDataset, run: Callable[..., Any]
) -> Callable[..., tuple[CheckTask, list[PassResult]]]:
    """A check of one process without a fault and its passes; run once for all tests."""

    @cache
    def of(mode: str, lookahead: int, rule: str) -> tuple[CheckTask, list[PassResult]]:
        task = host_check_task(baskets, 1, in_host(mode, lookahead), optimizers(rule))
        passes, trainers = run(task)
        assert_rows_of_every_kind(trainers, len(passes))
        return task, passes

    return of


# Each mode under each rule, and the shortest window and the longest.
@pytest.mark.parametrize(
    ("mode", "lookahead", "optimizer"),
    [
        *((mode, 2, rule) for mode in ("gather", "lookahead", "hotline") for rule in OPTIMIZERS),
        ("lookahead", 1, "adam"),
        ("lookahead", 8, "rowwise_adagrad"),
    ],
)
def test_a_right_run_passes(
    mode: str, lookahead: int, optimizer: str, right: Callable[..., Any]
) -> None:
    task, passes = right(mode, lookahead, optimizer)
    verdict(task.config, passes)
    assert [(p.precision, p.is_end_to_end) for p in passes] == [("fp64", True), ("fp32", False)]
    for result in passes:
        assert result.differences.num_steps == task.config.check.steps + NUM_MADE
        assert result.differences.num_values(ROWS) > 0
        assert result.differences.num_values(GRADIENTS) > 0
        assert bool(result.differences.num_values(STATE)) == (optimizer != "sgd")


# Two ranks' "row_wise" under `lookahead` and Adam are those of "clipping", below.
@pytest.mark.parametrize(
    ("world_size", "layout", "mode", "lookahead", "optimizer"),
    [
        (2, "table_wise", "gather", 1, "rowwise_adagrad"),
        (2, "table_wise", "hotline", 1, "adam"),
        (3, "row_wise", "hotline", 1, "rowwise_adagrad"),
        (3, "column_wise", "lookahead", 3, "adagrad"),
        (4, "table_row_wise", "lookahead", 8, "sgd"),
        (4, "auto", "lookahead", 1, "adam"),
    ],
)
def test_a_right_run_passes_on_any_ranks(
    world_size: int,
    layout: str,
    mode: str,
    lookahead: int,
    optimizer: str,
    baskets: PreparedDataset,
    run: Callable[..., Any],
) -> None:
    host = in_host(mode, lookahead, layout=layout)
    if layout == "auto":
        # Else `auto` would replicate all of these small tables, in device memory.
        layouts = {"many": "row_wise", "words": "table_wise"}
        host["sharding"]["tables"] = {name: {"layout": of} for name, of in layouts.items()}
    task = host_check_task(baskets, world_size, host, optimizers(optimizer))
    passes, trainers = run(task)
    verdict(task.config, passes)
    assert_rows_of_every_kind(trainers, len(passes))


VARIANTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "micro-batches": ("lookahead", "adagrad", {}, {"train": {"accumulate": 2}}),
    "micro-batches in series": ("gather", "adam", {}, {"train": {"accumulate": 3}}),
    "clipping": ("lookahead", "adam", {"clip_norm": 0.05}, {"train": {"accumulate": 2}}),
    "clipping of parts": ("hotline", "sgd", {"clip_norm": 0.05}, {}),
    "schedule": (
        "lookahead",
        "rowwise_adagrad",
        {"schedule": {"warmup_steps": 3, "decay_steps": 3}},
        {"train": {"epochs": 3, "max_steps": 9}},
    ),
    "weight decay": ("lookahead", "adam", {"sparse": {"weight_decay": 0.01}}, {}),
    "weight decay of parts": ("hotline", "adagrad", {"sparse": {"weight_decay": 0.01}}, {}),
    "no overlap": ("lookahead", "adagrad", {}, {"train": {"overlap": False}}),
    "no overlap of parts": ("hotline", "adagrad", {}, {"train": {"overlap": False}}),
    "dcnv2": ("hotline", "adam", {}, {"model": {"interaction": "dcnv2", "dcn_rank": 3}}),
    "bf16": ("lookahead", "adagrad", {}, {"train": {"precision": "bf16"}}),
    "bf16 on the wire": ("lookahead", "adagrad", {}, {"sharding": {"wire": "bf16"}}),
    "hot rows by a sample": (
        "lookahead",
        "adam",
        {},
        {"sharding": {"host": {"hot_from": "sample", "sample_share": 0.3}}},
    ),
}


IN_RANKS = ("clipping", "no overlap of parts", "bf16 on the wire", "hot rows by a sample")


@pytest.mark.parametrize(
    ("variant", "world_size"), [*((v, 1) for v in VARIANTS), *((v, 2) for v in IN_RANKS)]
)
def test_a_right_run_passes_whatever_its_settings(
    variant: str, world_size: int, baskets: PreparedDataset, run: Callable[..., Any]
) -> None:
    mode, name, optim, overrides = VARIANTS[variant]
    layout = "row_wise" if world_size > 1 else "auto"
    task = host_check_task(
        baskets, world_size, in_host(mode, 2, layout=layout), optimizers(name, **optim), overrides
    )
    passes, trainers = run(task)
    verdict(task.config, passes)
    assert_rows_of_every_kind(trainers, len(passes))


@pytest.mark.parametrize("hot_mb", [0, 1])
@pytest.mark.parametrize(("mode", "lookahead"), MODES)
def test_nothing_or_everything_may_be_hot(
    mode: str, lookahead: int, hot_mb: float, baskets: PreparedDataset, run: Callable[..., Any]
) -> None:
    host = in_host(mode, lookahead, hot_mb=hot_mb, whole_rows=1000)
    task = host_check_task(baskets, 1, host, optimizers("adam"))
    passes, trainers = run(task)
    verdict(task.config, passes)
    for trainer in trainers:
        counters = counters_of(trainer)
        assert counters.num_hot_lookups == (counters.num_lookups if hot_mb else 0)
        assert bool(counters.num_fetched) != bool(hot_mb)


def test_some_tables_in_host_memory_and_some_not(
    baskets: PreparedDataset, run: Callable[..., Any]
) -> None:
    host = in_host("lookahead", 2, layout="row_wise")
    host["sharding"]["tables"] = {
        "shared": {"memory": "device", "layout": "replicated"},
        "words": {"memory": "device"},
    }
    task = host_check_task(baskets, 2, host, optimizers("adam"))
    assert {(s.table, s.memory) for s in task.plan.shards} == {
        ("shared", "device"),
        ("words", "device"),
        ("many", "host"),
        ("one", "host"),
    }
    passes, trainers = run(task)
    verdict(task.config, passes)
    assert sum(counters_of(trainer).num_forwarded for trainer in trainers) > 0


# ------------------------------------------------------------------------------- what is wrong

# Mode and rule under which each fault has to be found; no fault is claimed of a rule without state
# that only state shows.
FAULTS = [
    *(("drop_forwarding", "lookahead", rule) for rule in OPTIMIZERS),
    *(("drop_forwarded_state", "lookahead", rule) for rule in ("rowwise_adagrad", "adam")),
    *(("drop_flush", mode, "adam") for mode in ("gather", "lookahead", "hotline")),
    *(("read_before_write", mode, "sgd") for mode in ("lookahead", "hotline")),
    *(("mean_of_parts", "hotline", rule) for rule in OPTIMIZERS),
    *(("update_per_part", "hotline", rule) for rule in OPTIMIZERS),
]
FIRSTS = {fault[0]: fault for fault in reversed(FAULTS)}


@pytest.fixture(scope="module")
def checked(
    baskets: PreparedDataset, run: Callable[..., Any]
) -> Callable[..., tuple[CheckTask, list[PassResult]]]:
    """A check with a fault planted (None: without) and its passes; run once for all tests."""

    @cache
    def of(
        name: str | None, mode: str, rule: str, world_size: int = 1
    ) -> tuple[CheckTask, list[PassResult]]:
        layout = "row_wise" if world_size > 1 else "auto"
        mutate = {"check": {"steps": 4, "mutate": name}}
        task = host_check_task(
            baskets, world_size, in_host(mode, layout=layout), optimizers(rule), mutate
        )
        passes, trainers = run(task)
        if name is None:
            assert_rows_of_every_kind(trainers, len(passes))
        return task, passes

    return of


def test_every_fault_is_tested() -> None:
    assert {name for name, _, _ in FAULTS} == {plant.__name__ for plant in HOST_FAULTS}


# On two ranks each fault once.
@pytest.mark.parametrize(
    ("name", "mode", "rule", "world_size"),
    [*((*fault, 1) for fault in FAULTS), *((*fault, 2) for fault in FIRSTS.values())],
)
def test_every_planted_fault_is_found_by_both_passes(
    name: str,
    mode: str,
    rule: str,
    world_size: int,
    checked: Callable[..., Any],
    right: Callable[..., Any],
) -> None:
    """The same configuration passes without it, for some steps more, so that nothing else is
    found."""
    without = right(mode, 2, rule) if world_size == 1 else checked(None, mode, rule, world_size)
    task, passes = without
    verdict(task.config, passes)
    task, passes = checked(name, mode, rule, world_size)
    assert len(passes) == 2
    with pytest.raises(CheckFailed, match=rf"FAIL \({name} was planted\).*the first was"):
        verdict(task.config, passes)
    for result in passes:
        assert result.differences.beyond(), result.title


@pytest.mark.parametrize(
    ("name", "mode", "seen_at"),
    [
        ("drop_forwarding", "lookahead", "rows of"),
        ("drop_forwarded_state", "lookahead", "state of"),
        ("drop_flush", "gather", "rows of"),
        ("mean_of_parts", "hotline", "gradients of pooled vectors"),
    ],
)
def test_a_fault_is_seen_at_its_own_stage(
    name: str, mode: str, seen_at: str, checked: Callable[..., Any]
) -> None:
    by_step = checked(name, mode, "rowwise_adagrad")[1][1]
    assert by_step.differences.first_beyond.startswith(seen_at)


@pytest.mark.parametrize(
    ("name", "overrides", "needs"),
    [
        ("drop_forwarding", in_host("gather"), "sharding.host.mode=lookahead"),
        ("drop_forwarding", in_host("hotline"), "sharding.host.mode=lookahead"),
        ("drop_forwarded_state", in_host("lookahead") | optimizers("sgd"), "sgd has none"),
        ("drop_forwarded_state", in_host("gather"), "sharding.host.mode=lookahead"),
        ("drop_flush", in_host("gather", hot_mb=0), "sharding.host.hot_mb=64"),
        ("read_before_write", in_host("gather"), "sharding.host.mode=lookahead"),
        ("mean_of_parts", in_host("lookahead"), "sharding.host.mode=hotline"),
        ("update_per_part", in_host("hotline", hot_mb=0), "sharding.host.hot_mb=64"),
        ("skip_state", in_host("gather") | optimizers("adam"), "sharding.memory=device"),
        ("stale_rows", in_host("gather"), "sharding.memory=device"),
    ],
)
def test_a_fault_that_cannot_show_is_refused(
    name: str, overrides: dict[str, Any], needs: str, baskets: PreparedDataset
) -> None:
    with pytest.raises(UserError, match=f"check.mutate={name} can't show here: it needs") as error:
        host_check_task(baskets, 1, overrides, {"check": {"mutate": name}})
    assert needs in str(error.value)


@pytest.mark.parametrize(
    ("name", "rule", "more"),
    [
        ("drop_duplicate_sum", "adagrad", {}),
        ("mean_of_means", "adam", {}),
        ("dense_not_summed", "sgd", {}),
        ("clip_local_norm", "sgd", {"optim": {"clip_norm": 0.05}}),
        ("ignore_schedule", "sgd", {"optim": {"schedule": {"warmup_steps": 2}}}),
        ("wrong_owner_row", "adagrad", {}),
        ("ignore_bag_weights", "adagrad", {}),
        ("sum_for_mean", "adagrad", {}),
    ],
)
def test_the_other_faults_are_found_with_tables_in_host_memory(
    name: str, rule: str, more: dict[str, Any], baskets: PreparedDataset
) -> None:
    host = in_host("lookahead", layout="row_wise")
    # 64 samples are one of every lane, so both ranks have half of them.
    mutate = {"check": {"steps": 2, "mutate": name}, "data": {"batch_size": 64}}
    task = host_check_task(baskets, 2, host, optimizers(rule), more, mutate)
    with pytest.raises(CheckFailed, match=f"{name} was planted"):
        verdict(task.config, run_on_threads(task))
