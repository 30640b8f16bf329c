"""The rank to blame: the one that failed or hangs, never the ones that lost it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlrm.blame import Evidence, Verdict, describe, find_failed, find_hanging
from dlrm.heartbeat import FINISHED, NO_STEP, START, Beat
from dlrm.worker import Failure

NOW_S = 1000.0
TIMEOUT_S = 30.0


def beat(
    rank: int, step: int = 5, phase: str = "forward", waits: str = "", age_s: float = 0
) -> Beat:
    """A rank's last sign of life, `age_s` ago."""
    return Beat(rank, 100 + rank, step, phase, waits, NOW_S - age_s)


def told(rank: int, kind: str, at_s: float = NOW_S) -> Failure:
    """What a worker told."""
    return Failure(rank, kind, at_s, f"{kind} of {rank}", "Traceback")


def hanging(*beats: Beat) -> Verdict | None:
    """The verdict while all run."""
    return find_hanging(list(beats), {b.rank for b in beats}, NOW_S, TIMEOUT_S)


def blamed(verdict: Verdict | None) -> int:
    """The rank."""
    assert verdict is not None
    return verdict.beat.rank


def failed(evidence: Evidence) -> Verdict:
    """The verdict of a run that failed."""
    verdict = find_failed(evidence, TIMEOUT_S)
    assert verdict is not None
    return verdict


# ------------------------------------------------------------------------------------- hanging


def test_nobody_hangs_before_the_timeout() -> None:
    assert hanging(beat(0, age_s=29), beat(1, waits="rows", age_s=29)) is None


def test_who_hangs_is_blamed_and_not_who_waits() -> None:
    verdict = hanging(beat(0, waits="rows", age_s=36), beat(1, age_s=36), beat(2, age_s=1))
    assert blamed(verdict) == 1
    assert verdict is not None
    assert describe(verdict.beat, 3, verdict.reason) == (
        "rank 1 of 3 (step 5, phase forward) gave no sign of life for 36 s (launch.timeout_s=30)"
    )


def test_of_several_that_hang_the_least_advanced_is_blamed() -> None:
    assert blamed(hanging(beat(0, age_s=40), beat(1, step=4, age_s=31), beat(2, age_s=50))) == 1
    assert blamed(hanging(beat(0, age_s=40), beat(1, age_s=41))) == 1


def test_who_keeps_others_waiting_is_blamed_though_it_beats() -> None:
    assert hanging(beat(0, waits="rows", age_s=34), beat(1)) is None  # The collective will tell.
    verdict = hanging(beat(0, waits="rows", age_s=36), beat(1, phase="evaluate", age_s=1))
    assert verdict is not None
    assert (verdict.beat.rank, verdict.reason) == (1, "didn't answer rank 0")


def test_the_start_may_take_longer() -> None:
    young = [beat(rank, NO_STEP, START, age_s=59) for rank in range(2)]
    assert hanging(*young) is None
    assert blamed(hanging(young[0], replace(young[1], time_s=NOW_S - 61))) == 1


def test_a_rank_that_ended_does_not_hang() -> None:
    beats = [beat(0, phase=FINISHED, age_s=99), beat(1)]
    assert find_hanging(beats, {1}, NOW_S, TIMEOUT_S) is None
    assert blamed(find_hanging(beats, {0, 1}, NOW_S, TIMEOUT_S)) == 0


# -------------------------------------------------------------------------------------- failed


def test_all_done() -> None:
    beats = [beat(rank, phase=FINISHED) for rank in range(2)]
    assert find_failed(Evidence(beats), TIMEOUT_S) is None


def test_the_first_that_failed_of_itself() -> None:
    lost, first, second = told(0, "secondary", 1.0), told(2, "error", 2.0), told(1, "user", 3.0)
    beats = [beat(rank) for rank in range(3)]
    verdict = failed(Evidence(beats, [lost, first, second], {0: 1, 1: 1, 2: 1}))
    assert verdict == Verdict(beats[2], "failed", first)


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ({0: 1, 1: -9}, "was killed by SIGKILL, as the kernel does when memory runs out"),
        ({1: -11, 0: 1}, "was killed by SIGSEGV"),
        ({0: 1, 1: 7}, "ended with exit status 7"),
        ({0: 1}, "ended with exit status 0 before its work was done"),
    ],
)
def test_a_silent_end_comes_before_what_it_caused(statuses: dict[int, int], reason: str) -> None:
    beats = [beat(0, waits="rows"), beat(1)]
    verdict = failed(Evidence(beats, [told(0, "secondary")], statuses))
    assert (verdict.beat.rank, verdict.reason) == (1, reason)


def test_the_launchers_own_signals_blame_nobody() -> None:
    beats = [beat(0, waits="rows"), beat(1, age_s=30), beat(2, NO_STEP, START)]
    statuses = {0: 1, 1: -9, 2: -15}
    evidence = Evidence(beats, [told(0, "secondary")], statuses, frozenset({1}))
    assert blamed(failed(evidence)) == 2  # The least advanced of those that rank 0 waited for.


def test_a_signal_from_elsewhere() -> None:
    beats = [beat(0, waits="rows"), beat(1)]
    stopped, lost = told(1, "stopped", 1.0), told(0, "secondary", 2.0)
    assert failed(Evidence(beats, [stopped, lost], {0: 1, 1: 1})).reason == (
        "was ended by a signal from elsewhere"
    )
    # The other way round it was the launcher's signal, and rank 1 is the one that hung.
    lost, stopped = told(0, "secondary", NOW_S), told(1, "stopped", NOW_S + 1)
    verdict = failed(Evidence([beats[0], beat(1, age_s=30)], [lost, stopped], {0: 1, 1: 1}))
    assert (verdict.beat.rank, verdict.told) == (1, lost)
    assert verdict.reason.startswith("gave no sign of life for 30 s")


def test_ranks_that_all_lost_each_other() -> None:
    lost = [told(rank, "secondary") for rank in range(2)]
    beats = [beat(0, waits="rows"), beat(1, step=4, waits="ids")]
    assert blamed(failed(Evidence(beats, lost, {0: 1, 1: 1}))) == 1


def test_a_rank_that_had_finished() -> None:
    beats = [beat(0, waits="rows"), beat(1, phase=FINISHED)]
    verdict = failed(Evidence(beats, [told(0, "secondary")], {0: 1}))
    assert (verdict.beat.rank, verdict.reason) == (1, "had finished, yet rank 0 waited for it")
