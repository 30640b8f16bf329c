"""Which rank is to blame when a run of several fails. Of the ranks that fail most do so because one
did: they lost their peer, or were told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from dlrm.heartbeat import START, Beat
from dlrm.worker import START_TIMEOUT_S, Failure

# A rank that waits in a collective has this much longer than the others: the collective's own
# timeout, which tells more, comes first.
_WAITING_EXTRA_S = 5.0
_END_TIMEOUT_S = 15.0
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class WorkersFailed(RuntimeError):
    """Workers of a run have failed; the message says which one is to blame, where it was and how
    it failed."""


@dataclass(frozen=True)
class Verdict:
    """The rank to blame.

    Attributes:
        beat: its last sign of life.
        reason: what happened to it: `failed`, `was killed by SIGKILL`.
        told: the failure as the rank told it, where it did.
        signal: the one that somebody ended it with, on purpose, as batch systems do; else 0.
    """

    beat: Beat
    reason: str
    told: Failure | None = None
    signal: int = 0


@dataclass(frozen=True)
class Evidence:
    """What is known of a run that has ended.

    Attributes:
        beats: the last sign of life of every rank, by rank.
        told: what workers told of their failures, the first one first.
        exit_statuses: of workers that ended with another than 0 (-N: by signal N), in the order in
            which they were seen to end.
        killed: ranks that the launcher killed.
    """

    beats: list[Beat]
    told: list[Failure] = field(default_factory=list)
    exit_statuses: dict[int, int] = field(default_factory=dict)
    killed: frozenset[int] = frozenset()


def find_hanging(
    beats: list[Beat], running: set[int], now_s: float, timeout_s: float
) -> Verdict | None:
    """The rank to blame once the beat of one that runs stands for longer than `timeout_s`."""

    def limit_s(beat: Beat) -> float:
        if beat.phase == START:
            return max(timeout_s, START_TIMEOUT_S)
        if beat.is_finished:  # Python takes its time to end, on a busy machine.
            return max(timeout_s, _END_TIMEOUT_S)
        return timeout_s + (_WAITING_EXTRA_S if beat.waits_for else 0.0)

    late = [b for b in beats if b.rank in running and now_s - b.time_s > limit_s(b)]
    if not late:
        return None
    waiting = {beat.rank for beat in beats if beat.waits_for}
    culprit = _least_advanced([beat for beat in late if not beat.waits_for])
    if culprit is None:
        culprit = _holding_up(beats, waiting)
    return Verdict(culprit, _describe_silence(culprit, now_s, timeout_s, waiting))


def find_failed(evidence: Evidence, timeout_s: float) -> Verdict | None:
    """The rank to blame for the end of a run; None where all ranks have done their work."""
    beats, told, statuses = evidence.beats, evidence.told, evidence.exit_statuses
    if not statuses and all(beat.is_finished for beat in beats):
        return None
    own = [failure for failure in told if failure.kind in ("error", "user", "os")]
    if own:
        return Verdict(beats[own[0].rank], "failed", own[0])
    have_told = {failure.rank for failure in told}
    for rank in [*statuses, *(beat.rank for beat in beats if beat.rank not in statuses)]:
        status = statuses.get(rank, 0)
        # The launcher's signal to a worker that was too young to handle it.
        is_stopped = status == -signal.SIGTERM and rank != next(iter(statuses))
        is_explained = beats[rank].is_finished or rank in have_told or rank in evidence.killed
        if not is_explained and not is_stopped:
            number = -status if -status in _END_SIGNALS else 0
            return Verdict(beats[rank], _describe_end(status), signal=number)
    if told and told[0].kind == "stopped":
        reason = "was ended by a signal from elsewhere"
        return Verdict(beats[told[0].rank], reason, signal=told[0].signal)
    lost = {failure.rank: failure for failure in told if failure.kind == "secondary"}
    culprit = _holding_up(beats, set(lost))
    first_lost_s = min((failure.time_s for failure in lost.values()), default=culprit.time_s)
    reason = _describe_silence(culprit, first_lost_s, timeout_s, set(lost))
    return Verdict(culprit, reason, next(iter(lost.values()), None))


def describe(beat: Beat, world_size: int, reason: str) -> str:
    """One line: `rank 1 of 2 (step 3, phase backward) was killed by SIGKILL`."""
    return f"rank {beat.rank} of {world_size} ({beat.place}) {reason}"


def _holding_up(beats: list[Beat], waiting: set[int]) -> Beat:
    """The rank for which those in `waiting` wait."""
    others = [beat for beat in beats if beat.rank not in waiting and not beat.waits_for]
    at_work = [beat for beat in others if not beat.is_finished]
    culprit = _least_advanced(at_work) or _least_advanced(others) or _least_advanced(beats)
    assert culprit is not None
    return culprit


def _least_advanced(beats: Iterable[Beat]) -> Beat | None:
    return min(beats, key=lambda beat: (beat.step, beat.time_s), default=None)


def _describe_silence(culprit: Beat, now_s: float, timeout_s: float, waiting: set[int]) -> str:
    silent_s = now_s - culprit.time_s
    if culprit.is_finished and waiting:
        return f"had finished, yet {_ranks(waiting)} waited for it"
    # Its own collective was cut short by `timeout_s`, a little after its last beat.
    if silent_s > 0.8 * timeout_s:
        return f"gave no sign of life for {silent_s:.0f} s (launch.timeout_s={timeout_s:g})"
    if waiting - {culprit.rank}:
        return f"didn't answer {_ranks(waiting - {culprit.rank})}"
    return "lost the other ranks"


def _describe_end(status: int) -> str:
    if status == 0:
        return "ended with exit status 0 before its work was done"
    if status > 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:4])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', …' if len(ranks) > 4 else ''}"
