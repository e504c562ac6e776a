"""Tests of how runs are set against the baseline: the target, ratios by seed and outcomes. Every expected number was worked out by
hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from llmtrain.compare.measures import Outcome, Results, gather, log_interval
from llmtrain.compare.results import load_trials
from llmtrain.errors import ResultsError
from tests.unit.written_trials import logged, straight, validation, write_trial


def results_of(folder: Path, **options) -> Results:
    return gather(load_trials([folder]), **options)


def runs_of(folder: Path, **options) -> dict[str, pd.Series]:
    """Return the row of each run under the only condition."""
    runs = results_of(folder, **options).runs
    return {run: runs.loc[("plain", run)] for run in runs.index.get_level_values("run")}


def spread(row: pd.Series, measure: str) -> tuple[float, float, float]:
    return tuple(row[measure][["median", "low", "high"]])


def outcome(row: pd.Series) -> Outcome:
    return row["outcome", ""]


def write_runs(folder: Path, ends: dict[str, list[tuple[float, float]]], condition: str = "plain") -> None:
    """Write trials with straight loss curves from 8. `ends` maps each run to (seconds, final loss) of its seeds."""
    for run, seeds in ends.items():
        for seed, (seconds, loss) in enumerate(seeds, 1):
            write_trial(folder, condition, run, seed, straight(seconds, loss))


def test_speed_up_and_its_range(tmp_path: Path) -> None:
    # At a target of 4.0, the baseline's first two seeds reach it after 100 and 90 s, and the third one never does. edit's seeds
    # all end at 4.0, so they reach it at their ends, and two seeds have a ratio.
    ends = {"synchronous": [(100, 4.0), (90 * 5 / 4, 3.0), (80, 4.2)], "edit": [(20, 4.0), (25, 4.0), (18, 4.0)]}
    write_runs(tmp_path, ends)
    base, edit = runs_of(tmp_path, target=4.0).values()
    assert outcome(base) == Outcome.BASELINE and math.isnan(base["speed_up", "median"])
    assert spread(base, "seconds") == (100.0, 90.0, 100.0)
    assert list(base["seconds"][["finite", "seeds"]]) == [2, 3]
    assert spread(edit, "seconds") == (20.0, 18.0, 25.0) and outcome(edit) == Outcome.NOT_SIGNIFICANT
    assert spread(edit, "speed_up") == pytest.approx(((100 / 20 + 90 / 25) / 2, 90 / 25, 100 / 20))
    assert list(edit["speed_up"][["finite", "seeds"]]) == [2, 3]


@pytest.mark.parametrize(
    ("speed_ups", "expected"),
    [
        ([2.0, 0.95], Outcome.NOT_SIGNIFICANT),
        ([2.0, 2.2], Outcome.FASTER),
        ([2.0, 2.3], Outcome.NOT_SIGNIFICANT),
        ([2.0, 2.5, 3.5], Outcome.FASTER),
        ([1.05, 1.7, 3.3], Outcome.NOT_SIGNIFICANT),
        ([1 / 1.05, 1 / 1.7, 1 / 3.3], Outcome.NOT_SIGNIFICANT),
        ([0.5, 0.6, 0.45], Outcome.SLOWER),
        ([0.98, 1.2, 1.2, 1.25, 1.25, 1.3], Outcome.FASTER),
        ([1.02, 0.8, 0.8, 0.75, 0.75, 0.7], Outcome.SLOWER),
        ([1.0] * 3, Outcome.NOT_SIGNIFICANT),
        ([1.25] * 3, Outcome.FASTER),
        ([1.05], Outcome.FASTER),
        ([0.95], Outcome.SLOWER),
        ([1.0], Outcome.NOT_SIGNIFICANT),
    ],
)
def test_the_confidence_interval_over_seeds_decides(tmp_path: Path, speed_ups: list[float], expected: Outcome) -> None:
    ends = [(100 / speed_up, 4.0) for speed_up in speed_ups]
    write_runs(tmp_path, {"synchronous": [(100, 4.0)] * len(speed_ups), "edit": ends})
    assert outcome(runs_of(tmp_path)["edit"]) == expected


@pytest.mark.parametrize("count", range(2, 13))
def test_the_interval_is_that_of_scipy(count: int) -> None:
    """Compare up to ten ratios exactly; beyond that, `log_interval` uses the quantile of ten ratios, which is wider."""
    stats = pytest.importorskip("scipy.stats")
    ratios = pd.Series([*np.random.default_rng(count).lognormal(0.3, 0.5, count), math.nan, math.inf])
    logs = np.log(ratios[:count])
    low, high = stats.t.interval(0.95, count - 1, logs.mean(), stats.sem(logs))
    half = (high - low) / 2 * (1 if count <= 10 else 2.262 / stats.t.ppf(0.975, count - 1))
    assert log_interval(ratios) == pytest.approx((logs.mean() - half, logs.mean() + half), abs=3e-4 * half)


def test_a_ratio_of_zero_leaves_the_interval_finite() -> None:
    low, high = log_interval(pd.Series([0.0, 1.0]))
    assert -math.inf < low < 0 < high < math.inf
    assert all(math.isnan(end) for end in log_interval(pd.Series([math.nan, math.inf])))


def test_ratios_pair_trials_of_the_same_seed(tmp_path: Path) -> None:
    """The machine is half as fast during the second seed, so the ranges of times overlap, and the ratio of the median times is
    110 / 75. The seeds of `edit` are in another order than those of the baseline."""
    seconds = {"synchronous": {1: 100, 2: 200, 3: 110}, "edit": {3: 72, 2: 150, 1: 75}}
    sent = {"synchronous": {1: 1000, 2: 2000, 3: 3000}, "edit": {3: 300, 2: 400, 1: 10}}
    for run, by_seed in seconds.items():
        for seed, end in by_seed.items():
            write_trial(tmp_path, "plain", run, seed, straight(end, 4.0, sent[run][seed]))
    edit = runs_of(tmp_path, planned=[("plain", "edit", 3)])["edit"]
    assert spread(edit, "speed_up") == spread(edit, "own_speed_up") == pytest.approx((100 / 75, 200 / 150, 110 / 72))
    assert spread(edit, "byte_share") == (0.1, 0.01, 0.2)
    assert outcome(edit) == Outcome.FASTER


@pytest.mark.parametrize("state", [None, "failed"], ids=["not yet run", "failed"])
def test_a_seed_without_the_baseline_has_no_ratio(tmp_path: Path, state: str | None) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)] * 2, "edit": [(50, 4.0), (25, 4.0), (1, 4.0)]})
    if state:
        write_trial(tmp_path, "plain", "synchronous", 3, straight(1, 4.0), state=state)
    edit = runs_of(tmp_path)["edit"]
    for name, expected in {
        "speed_up": (3.0, 2.0, 4.0),
        "own_speed_up": (3.0, 2.0, 4.0),
        "byte_share": (1, 1, 1),
    }.items():
        assert spread(edit, name) == expected and list(edit[name][["finite", "seeds"]]) == [2, 3]


def test_runs_that_reach_the_target_with_other_seeds_than_the_baseline_are_not_comparable(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0), (100, 5.0)], "edit": [(50, 5.0), (50, 4.0)]})
    edit = runs_of(tmp_path, target=4.0)["edit"]
    assert outcome(edit) == Outcome.NOT_COMPARABLE
    assert list(edit["speed_up"][["finite", "seeds"]]) == [0, 2]


def test_a_target_that_is_reached_before_the_first_step_has_no_speed_up(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)]})
    write_trial(tmp_path, "plain", "edit", 1, [validation(0, 0.0, 4.0), logged(10, 50, 0.0), validation(10, 50, 3.0)])
    edit = runs_of(tmp_path)["edit"]
    assert outcome(edit) == Outcome.NOT_COMPARABLE and math.isnan(edit["speed_up", "median"])


def test_the_speed_up_to_a_runs_own_final_loss_is_that_of_each_seed(tmp_path: Path) -> None:
    # The baseline passes 6.0 after 50 s and 5.0 after 75 s. No seed of it reaches 3.0.
    write_runs(tmp_path, {"synchronous": [(100, 4.0)] * 3, "edit": [(50, 6.0), (25, 5.0), (90, 3.0)]})
    edit = runs_of(tmp_path)["edit"]
    assert spread(edit, "own_speed_up") == (2.0, 1.0, 3.0)
    assert list(edit["own_speed_up"][["finite", "seeds"]]) == [2, 3]


def test_slower_and_never(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)], "slow": [(200, 4.0)], "worse": [(50, 6.0)]})
    runs = runs_of(tmp_path)
    assert outcome(runs["slow"]) == Outcome.SLOWER and spread(runs["slow"], "speed_up") == (0.5, 0.5, 0.5)
    assert outcome(runs["worse"]) == Outcome.NOT_REACHED and math.isnan(runs["worse"]["speed_up", "median"])
    # The baseline reached 6.0, halfway from 8 to 4, after 50 s, when the other run ended at 6.0.
    assert runs["worse"]["own_speed_up", "median"] == 1.0


def test_a_speed_up_leaves_out_seeds_that_miss_the_target(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)] * 3, "edit": [(10, 4.0), (10, 5.0), (10, 5.0)]})
    edit = runs_of(tmp_path)["edit"]
    assert edit["seconds", "median"] == math.inf and spread(edit, "speed_up") == (10.0, 10.0, 10.0)
    assert list(edit["speed_up"][["finite", "seeds"]]) == [1, 3]
    assert outcome(edit) == Outcome.MIXED


def test_every_seed_of_the_baseline_reaches_the_default_target(tmp_path: Path) -> None:
    """Each condition has its own target: the highest final loss of the baseline, which is that of its last seed, and not that of
    another run. So no pair of seeds is lost."""
    write_runs(tmp_path, {"synchronous": [(100, 4.0), (100, 4.1), (100, 4.4)], "edit": [(50, 4.4)] * 3})
    write_runs(tmp_path, {"synchronous": [(100, 5.0)], "edit": [(50, 6.0)]}, "thin")
    assert results_of(tmp_path).targets == {"plain": 4.4, "thin": 5.0}
    runs = runs_of(tmp_path)
    # The baseline falls by 3.6 of 4.0, 3.9 and 3.6.
    assert spread(runs["synchronous"], "seconds") == pytest.approx((100 * 3.6 / 3.9, 90.0, 100.0))
    assert list(runs["synchronous"]["seconds"][["finite", "seeds"]]) == [3, 3]
    assert spread(runs["edit"], "speed_up") == pytest.approx((2 * 3.6 / 3.9, 1.8, 2.0))
    assert outcome(runs["edit"]) == Outcome.FASTER


def test_failed_and_stopped_seeds_of_the_baseline_set_no_target(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0), (100, None)]})
    write_trial(tmp_path, "plain", "synchronous", 3, straight(100, 7.0), state="failed")
    write_trial(tmp_path, "plain", "synchronous", 4, straight(100, 6.0), state="stopped")
    assert results_of(tmp_path).targets == {"plain": 4.0}


def test_share_of_bytes(tmp_path: Path) -> None:
    write_trial(tmp_path, "plain", "synchronous", 1, straight(100, 4.0, sent=5000.0))
    write_trial(tmp_path, "plain", "edit", 1, straight(50, 2.0, sent=300.0))
    # edit reaches 4.0 after two thirds of the way from 8 to 2, when it has sent 200 of its 300 bytes.
    runs = runs_of(tmp_path)
    assert runs["edit"]["byte_share", "median"] == pytest.approx(200 / 5000)
    assert math.isnan(runs["synchronous"]["byte_share", "median"])


def test_failed_trials_count_in_nothing_and_stopped_ones_only_until_they_stopped(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)], "edit": [(20, 4.0)]})
    write_trial(tmp_path, "plain", "edit", 2, straight(1, 1.0), state="failed")
    write_trial(tmp_path, "plain", "edit", 3, straight(10, 4.0), state="stopped")
    edit = runs_of(tmp_path)["edit"]
    assert spread(edit, "seconds") == (15.0, 10.0, 20.0) and spread(edit, "tokens_per_second") == (75.0, 50.0, 100.0)
    assert spread(edit, "final_loss") == (4.0, 4.0, 4.0) and edit["final_loss", "seeds"] == 1


@pytest.mark.parametrize(
    ("failed", "of_baseline", "seconds", "expected"),
    [
        (0, 0, 20, Outcome.FASTER),
        (1, 0, 20, Outcome.MIXED),
        (4, 0, 20, Outcome.MIXED),
        (1, 1, 20, Outcome.FASTER),
        (2, 3, 20, Outcome.MIXED),  # half of edit's seeds reach the target
        (1, 1, 200, Outcome.SLOWER),
        (0, 1, 200, Outcome.MIXED),
        (1, 0, 200, Outcome.SLOWER),
        (1, 0, 100, Outcome.NOT_SIGNIFICANT),
    ],
)
def test_a_failed_trial_is_a_seed_that_did_not_reach_the_target(
    tmp_path: Path, failed: int, of_baseline: int, seconds: int, expected: Outcome
) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)] * 2, "edit": [(seconds, 4.0)] * 2})
    for run, count in (("edit", failed), ("synchronous", of_baseline)):
        for seed in range(3, 3 + count):
            write_trial(tmp_path, "plain", run, seed, straight(10, None), state="failed")
    edit = runs_of(tmp_path)["edit"]
    assert outcome(edit) == expected and edit["failed", ""] == failed
    assert edit["speed_up", "median"] == 100 / seconds


def test_a_given_target_and_baseline(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)], "edit": [(20, 4.0)]})
    runs = runs_of(tmp_path, baseline="edit", target=6.0)
    assert list(runs) == ["edit", "synchronous"] and outcome(runs["edit"]) == Outcome.BASELINE
    assert runs["synchronous"]["seconds", "median"] == 50.0 and runs["synchronous"]["speed_up", "median"] == 0.2
    with pytest.raises(ResultsError, match="no run is called 'diloco', the baseline; there are edit, synchronous"):
        results_of(tmp_path, baseline="diloco")


def test_a_condition_without_the_baseline_compares_nothing(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)], "edit": [(20, 4.0)]})
    write_runs(tmp_path, {"edit": [(20, 4.0)], "worse": [(20, 7.0)]}, "thin")
    outcomes = results_of(tmp_path, target=6.0).runs["outcome"]
    assert outcomes["thin"].to_dict() == {"edit": Outcome.NOT_COMPARABLE, "worse": Outcome.NOT_REACHED}


def test_the_baseline_is_the_synchronous_run_else_the_first(tmp_path: Path) -> None:
    write_runs(tmp_path, {"a": [(20, 4.0)], "b": [(20, 4.0)]})
    assert results_of(tmp_path).baseline == "a"
    write_trial(tmp_path, "plain", "c", 1, straight(1, 4.0), method="synchronous")
    assert results_of(tmp_path).baseline == "c"


@pytest.mark.parametrize(
    "conditions", [["unlimited", "1gbit", "300mbit", "30mbit"], ["nobody", "lag0.2", "lag10"], ["b", "a_1", "a_2"]]
)
def test_without_a_plan_conditions_follow_their_number_from_best_to_worst(
    tmp_path: Path, conditions: list[str]
) -> None:
    for condition in conditions:
        write_runs(tmp_path, {"edit": [(20, 4.0)]}, condition)
    assert list(results_of(tmp_path).targets) == conditions
