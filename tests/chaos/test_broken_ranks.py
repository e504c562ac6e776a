"""Tests of a rank that freezes or dies, in every phase of a run: all others end in time with an error, and no process is left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.broken_launch import launch
from tests.chaos.broken_rank import PHASES
from tests.end_to_end.runs import Runs
from tests.mother import session

TRUE_TIMEOUT, SHORT_TIMEOUT = 15, 8
"""Values of `run.timeout_seconds`."""
MORE, MORE_FAST = 20, 100
"""Seconds beyond the timeout within which all processes must end. MORE_FAST is for `make test`, which may run on a busy machine;
`make chaos` takes less than 10. torchrun would give a frozen rank the GIVEN_SECONDS of `broken_launch`, which are more."""
FAST = {("in a synchronization", "SIGSTOP", 0)}
DEEP = {("while a checkpoint is written", "SIGKILL", 1), ("while ranks start", "SIGSTOP", 1)}
"""Cases of `make test-deep`. Cases in neither set are for `make chaos`."""
CASES = [(phase, number, rank) for phase in PHASES for number in ("SIGSTOP", "SIGKILL") for rank in (0, 1)]
KEYS = ("checkpoint.every=6", "eval.every=6", "parallel.replicas=2", "parallel.shards=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("broken"))


def tier(case: tuple[str, str, int]) -> list[pytest.MarkDecorator]:
    return [] if case in FAST else [pytest.mark.deep] if case in DEEP else [pytest.mark.chaos]


@pytest.mark.parametrize(("phase", "number", "rank"), [pytest.param(*case, marks=tier(case)) for case in CASES])
def test_all_others_end_in_time(runs: Runs, tmp_path: Path, phase: str, number: str, rank: int) -> None:
    name = f"{phase.replace(' ', '-')}-{number}-{rank}"
    file = tmp_path / "when"
    timeout, more = (SHORT_TIMEOUT, MORE_FAST) if (phase, number, rank) in FAST else (TRUE_TIMEOUT, MORE)
    arguments = runs.command(name, *KEYS, f"run.timeout_seconds={timeout}")[2:]
    process = session().fork(
        launch, phase, number, str(rank), str(file), *arguments, environment=runs.environment, capture=True
    )
    code, output = runs.end(process)  # ends when the last process that can write is gone
    assert file.exists(), f"the rank never broke: {output}"
    assert code == 1, output
    waited = time.time() - float(file.read_text())
    assert waited < timeout + more, f"{waited:.0f} s: {output}"
    print(f"\n{number} of rank {rank} {phase}: over after {waited:.1f} s (timeout {timeout} s)")
    if number == "SIGSTOP":
        assert "error: " in output, output
