"""Real runs, killed. The first tests are part of `make test`; the rest is `make chaos`."""

from __future__ import annotations

import random

import pytest

from tests.chaos.harness import Victim, kill
from tests.end_to_end.runs import Runs, exact

METHODS = {"edit": [], "diloco": [], "streaming_diloco": ["sync.schedule.steps=2"], "palsgd": []}
"""And what their presets need in rounds of four steps."""
KILLS = 25
"""Of each method."""
OFTEN = ["train.steps=60", "checkpoint.every=3", "log.every=3", "eval.every=20", "eval.sample_prompt=null"]
SHORT = [*OFTEN, "train.steps=30", "parallel.shard=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("chaos"))


def undisturbed(runs: Runs, name: str, *overrides: str) -> list[dict]:
    code, output = runs.run(name, *overrides)
    assert code == 0, output
    return [exact(line) for line in runs.lines(name)]


@pytest.fixture(scope="module")
def whole(runs: Runs) -> list[dict]:
    return undisturbed(runs, "whole", *SHORT)


def test_a_rank_that_is_killed_costs_nothing_but_time(runs: Runs, whole: list[dict]) -> None:
    """The launcher starts the ranks again by itself, from the last checkpoint."""
    victim = Victim(runs, "restarted", *SHORT)
    process = victim.start("run.restarts=1", "run.timeout_seconds=20")
    runs.wait_for("restarted", 9)
    ranks = victim.ranks()
    assert len(ranks) == 2
    kill(ranks[-1])
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "the run failed; its ranks are started again (0 of 1 restarts left)" in output
    assert output.count("continuing from") == 1
    assert [exact(line) for line in runs.lines("restarted")] == whole


def test_killed_in_the_middle_of_a_write(runs: Runs, whole: list[dict]) -> None:
    victim = Victim(runs, "torn", *SHORT)
    victim.kill_in_a_write(after_step=9)
    output = victim.finish()
    assert "continuing from" in output
    assert [exact(line) for line in runs.lines("torn")] == whole
    assert not list(victim.checkpoints.glob("*.tmp"))


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", METHODS)
def test_many_kills_at_random_moments(runs: Runs, method: str) -> None:
    keys = [*OFTEN, f"sync.method={method}", *METHODS[method]]
    expected = undisturbed(runs, f"{method}-whole", *keys)
    draw = random.Random(f"kills of {method}")
    kills = starts = rounds = 0
    figures = []
    while kills < KILLS:
        rounds += 1
        victim = Victim(runs, f"{method}-{rounds}", *keys)
        while kills < KILLS and victim.kill_at_random(draw, timeout_seconds=20):
            kills += 1
        victim.finish()
        starts += victim.damage.kills + 1
        assert [exact(line) for line in runs.lines(victim.name)] == expected, f"run {rounds} of {method}"
        figures.append(victim.damage)
    print(
        f"\n{method}: {kills} SIGKILLs ({sum(one.whole_groups for one in figures)} of everything, the rest of one rank; "
        f"{sum(one.before_training for one in figures)} while starting, {sum(one.in_writes for one in figures)} in a checkpoint's "
        f"write) in {rounds} runs and {starts} starts: every run ended with the losses of the undisturbed one; "
        f"at most {max(max(one.steps_lost, default=0) for one in figures)} steps were trained twice"
    )
