"""Tests of real runs that are killed: a few times in `make test` and `make test-deep`, many times in `make chaos`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.harness import Victim, kill
from tests.end_to_end.runs import Runs, exact_lines, ranks_of

METHODS = {"edit": [], "diloco": [], "streaming_diloco": ["sync.schedule.steps=2"], "palsgd": []}
"""Methods, with the overrides that their presets need in rounds of four steps."""
KILLS = 25
"""Number of kills per method."""
OFTEN = ["train.steps=60", "checkpoint.every=3", "log.every=3", "eval.every=20", "eval.sample_prompt=null"]
TWO = ["parallel.replicas=2", "parallel.shards=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("chaos"))
    made.reference(2, 1)  # the run with which these tests compare
    return made


@pytest.mark.deep
def test_a_rank_that_is_killed_costs_nothing_but_time(runs: Runs) -> None:
    """The launcher starts the ranks again by itself, from the last checkpoint."""
    process = runs.start_held("restarted", 7, *TWO, "run.restarts=1", "run.timeout_seconds=20")
    runs.wait_for("restarted", 6)  # checkpoints are written in the background
    ranks = ranks_of(process)
    assert len(ranks) == 2
    kill(ranks[-1])
    code, output = runs.end(process)
    assert code == 0, output
    assert "the run failed; its ranks are started again (0 of 1 restarts left)" in output
    assert output.count("continuing from") == 1
    assert runs.exact("restarted") == exact_lines(runs.reference(2, 1))


def test_killed_in_the_middle_of_a_write(runs: Runs, tmp_path: Path) -> None:
    victim = Victim(runs, "torn", *TWO)
    victim.kill_in_a_write(tmp_path / "stopped")
    assert [path.name for path in victim.checkpoints.glob("step-*.tmp")] == ["step-00000006.tmp"]
    output = victim.finish()
    assert f"continuing from {victim.checkpoints}/step-00000003\n" in output
    assert runs.exact("torn") == exact_lines(runs.reference(2, 1))
    assert not list(victim.checkpoints.glob("*.tmp"))


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", METHODS)
def test_many_kills_at_random_moments(runs: Runs, method: str) -> None:
    keys = [*OFTEN, f"sync.method={method}", *METHODS[method]]
    expected = exact_lines(runs.reference(2, 2, *keys))
    draw = random.Random(f"kills of {method}")
    kills = starts = rounds = 0
    figures = []
    while kills < KILLS:
        rounds += 1
        victim = Victim(runs, f"{method}-{rounds}", *keys, fresh=True)
        while kills < KILLS and victim.kill_at_random(draw, timeout_seconds=20):
            kills += 1
        victim.finish()
        starts += victim.damage.kills + 1
        assert runs.exact(victim.name) == expected, f"run {rounds} of {method}"
        figures.append(victim.damage)
    print(
        f"\n{method}: {kills} SIGKILLs ({sum(one.whole_groups for one in figures)} of everything, the rest of one rank; "
        f"{sum(one.before_training for one in figures)} while starting, {sum(one.in_writes for one in figures)} in a checkpoint's "
        f"write) in {rounds} runs and {starts} starts: every run ended with the losses of the undisturbed one; "
        f"at most {max(max(one.steps_lost, default=0) for one in figures)} steps were trained twice"
    )
