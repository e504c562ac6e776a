"""One rank freezes or dies, in every phase of a run: all others end in time with an error, and no process is left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.broken_rank import PHASES
from tests.end_to_end.runs import ROOT, Runs, environment

TIMEOUT, MORE = 15, 20
"""Seconds: `run.timeout_seconds`, and what everything may take beyond it on a busy machine; on one that is not it is less than
10, as `make chaos` shows. torchrun alone would give a frozen rank 30."""
QUICK = {
    ("in a synchronisation", "SIGSTOP", 0),
    ("while a checkpoint is written", "SIGKILL", 1),
    ("while ranks start", "SIGSTOP", 1),
}
"""Part of `make test`; the rest is `make chaos`."""
CASES = [(phase, number, rank) for phase in PHASES for number in ("SIGSTOP", "SIGKILL") for rank in (0, 1)]
KEYS = (
    "train.steps=14",
    "checkpoint.every=6",
    "log.every=2",
    "eval.every=6",
    "eval.sample_prompt=null",
    "parallel.shard=1",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("broken"))
    code, output = made.run("prepares", *KEYS, "train.steps=3")
    assert code == 0, output
    return made


@pytest.mark.parametrize(
    ("phase", "number", "rank"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.chaos]) for case in CASES],
)
def test_all_others_end_in_time(runs: Runs, tmp_path: Path, phase: str, number: str, rank: int) -> None:
    name = f"{phase.replace(' ', '-')}-{number}-{rank}"
    file = tmp_path / "when"
    arguments = runs.command(name, *KEYS, f"run.timeout_seconds={TIMEOUT}")[2:]
    command = [sys.executable, "-m", "tests.chaos.broken_launch", phase, number, str(rank), str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180)
    output = done.stdout + done.stderr
    assert file.exists(), f"it never happened: {output}"
    assert done.returncode == 1, output
    waited = time.time() - float(file.read_text())
    assert waited < TIMEOUT + MORE, f"{waited:.0f} s: {output}"
    print(f"\n{number} of rank {rank} {phase}: over after {waited:.1f} s (timeout {TIMEOUT} s)")
    assert subprocess.run(["pgrep", "-f", f"run.name={name}( |$)"], capture_output=True).stdout == b""
    if number == "SIGSTOP":
        assert "error: " in output, output
