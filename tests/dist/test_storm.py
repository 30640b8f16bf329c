"""Killed at any moment, a run that is resumed ends with the model of one that nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm.bench.storm import run_storm


@pytest.mark.timeout(280)
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_model(tmp_path: Path) -> None:
    """Four kills with SIGKILL, of each rank and of all processes, within saves and elsewhere."""
    said: list[str] = []
    storm = run_storm(tmp_path / "storm", 4, 0, said.append)
    assert storm.problems == []
    assert storm.digest == storm.expected_digest
    assert len(said) == len(storm.kills) == 4
    assert {kill.victim for kill in storm.kills} == {"all", "0", "1"}
    assert any(kill.was_saving for kill in storm.kills), "no kill has hit a save"
    assert storm.kills[-1].resumed_from is not None, "nothing was resumed"
