"""What is read from trials and computed from it; every expected number was worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llmtrain.compare.aggregate import Outcome, RunResult, gather
from llmtrain.compare.measures import (
    Cost,
    OnTheWire,
    TimeSplit,
    bytes_sent,
    cost_to_reach,
    final_loss,
    on_the_wire,
    time_split,
    tokens_per_second,
    validations,
)
from llmtrain.compare.results import Span, Trial, load_trials
from llmtrain.compare.sweep_axis import find_sweeps
from llmtrain.errors import ResultsError
from tests.unit.written_trials import logged, straight, validation, write_run, write_trial

CURVE = [
    validation(0, 0.0, 8.0),
    logged(4, 8.0, sent=400.0),
    logged(10, 20.0, sent=2200.0, exposed=6.0, waited=2.0),
    validation(10, 20.0, 6.0),
    logged(20, 60.0, sent=4000.0, exposed=25.0, waited=10.0),
    validation(20, 60.0, 5.0),
]


def only(folder: Path) -> Trial:
    (trial,) = load_trials([folder])
    return trial


def one(folder: Path, lines: list[dict], **told) -> Trial:
    write_trial(folder, "plain", "diloco", 1, lines, **told)
    return only(folder)


def results_of(folder: Path, **options) -> dict[str, RunResult]:
    (condition,) = gather(load_trials([folder]), **options).conditions
    return {run.run: run for run in condition.runs}


def test_a_trial_is_read_back(tmp_path: Path) -> None:
    hosts = [{"name": "host0", "address": "10.0.0.1", "sent": 7, "received": 5}]
    trial = one(tmp_path, CURVE, hosts=hosts, exit_codes=[0, None], overrides=["a=1"], commit="abc", wall_seconds=3.5)
    assert (trial.condition, trial.run, trial.seed, trial.state, trial.method) == (
        "plain",
        "diloco",
        1,
        "done",
        "diloco",
    )
    assert trial.exit_codes == (0, None) and trial.overrides == ("a=1",) and trial.commit == "abc"
    assert (trial.hosts[0].sent, trial.hosts[0].received, trial.wall_seconds) == (7, 5, 3.5)
    assert len(trial.lines) == len(CURVE) and not trial.averages_every_step and trial.spans == {}


@pytest.mark.parametrize(("stopped", "state"), [("done", "done"), ("signal", "stopped"), ("error", "failed")])
def test_an_ordinary_run_is_a_trial_of_its_own(tmp_path: Path, stopped: str, state: str) -> None:
    write_run(tmp_path / "runs" / "mine", CURVE, "synchronous", seed=7, stopped=stopped)
    trial = only(tmp_path / "runs" / "mine")
    assert (trial.condition, trial.run, trial.seed, trial.state) == ("as run", "mine", 7, state)
    assert trial.averages_every_step


def test_a_run_without_a_summary_is_unfinished(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", CURVE, "diloco")
    (tmp_path / "mine" / "summary.json").unlink()
    assert only(tmp_path).state == "unfinished"


def test_a_trial_of_a_comparison_that_has_not_ended_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "comparison.yaml").write_text("")
    write_trial(tmp_path, "plain", "diloco", 1, CURVE)
    (write_trial(tmp_path, "plain", "diloco", 2, CURVE) / "trial.json").unlink()
    assert [trial.seed for trial in load_trials([tmp_path])] == [1]


def test_a_trial_that_broke_before_its_recipe_stays_with_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "plain" / "edit" / "seed-1"
    path.mkdir(parents=True)
    told = {"condition": "plain", "run": "edit", "seed": 1, "state": "failed", "last_lines": ["error: no such file"]}
    (path / "trial.json").write_text(json.dumps(told))
    trial = only(tmp_path)
    assert (trial.state, trial.method, trial.lines, trial.last_lines) == ("failed", None, (), ("error: no such file",))


@pytest.mark.parametrize("line", ['{"step": 30, "tok', "30", '["step", "tokens", "seconds"]', '{"step": 30}'])
def test_lines_that_are_cut_off_or_no_metrics_are_skipped(tmp_path: Path, line: str) -> None:
    path = write_trial(tmp_path, "plain", "diloco", 1, CURVE) / "metrics.jsonl"
    path.write_text(f"{line}\n{path.read_text()}{line}")
    assert len(only(tmp_path).lines) == len(CURVE)


def test_spans_are_read_in_order(tmp_path: Path) -> None:
    path = write_trial(tmp_path, "plain", "diloco", 1, CURVE)
    spans = [
        {"kind": "message", "name": "m", "step": 4, "start": 2.0, "end": 3.0, "bytes": 9.0},
        {"kind": "step", "name": "", "step": 4, "start": 1.0, "end": 2.0},
    ]
    (path / "trace").mkdir()
    text = "".join(json.dumps(span) + "\n" for span in spans)
    (path / "trace" / "rank-00002.jsonl").write_text(text + '{"kind": "st')
    assert only(tmp_path).spans == {2: [Span("step", "", 4, 1.0, 2.0), Span("message", "m", 4, 2.0, 3.0, 9.0)]}


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    path = write_trial(tmp_path, "plain", "diloco", 1, CURVE)
    assert len(load_trials([tmp_path, path, tmp_path])) == 1


def test_directories_that_hold_nothing_are_named(tmp_path: Path) -> None:
    write_trial(tmp_path / "full", "plain", "diloco", 1, CURVE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ResultsError, match=r"empty holds no run that has ended: expected trial\.json, or metrics\.jsonl"
    ):
        load_trials([tmp_path / "full", tmp_path / "empty"])


def test_two_trials_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_run(tmp_path / folder / "mine", CURVE, "diloco", seed=3)
    with pytest.raises(ResultsError, match="are both run 'mine' with seed 3 under 'as run'"):
        load_trials([tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trial.json", b"{", r"trial\.json is damaged \(.*\); delete its folder to run that trial again"),
        ("trial.json", b'{"run": "\xff"}', r"trial\.json is damaged \(.*can't decode byte 0xff.*\); delete its folder"),
        ("trial.json", b"[]", r"trial\.json holds no JSON object; delete its folder"),
        (
            "trial.json",
            b'{"hosts": [{}]}',
            r"seed-1 is not what a trial leaves behind \(KeyError\('name'\)\); delete it",
        ),
        ("recipe.yaml", b"run: [\nsync:", r"recipe\.yaml is damaged \(while parsing a flow .*\); delete its folder"),
        ("recipe.yaml", b"run: \xff", r"recipe\.yaml is damaged \(.*can't decode byte 0xff.*\); delete its folder"),
        ("recipe.yaml", b"sync: edit", r"seed-1 is not what a trial leaves behind"),
    ],
    ids=["cut off", "binary", "a list", "a host without a name", "cut off recipe", "binary recipe", "no section"],
)
def test_a_damaged_trial_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (write_trial(tmp_path, "plain", "diloco", 1, CURVE) / name).write_bytes(content)
    with pytest.raises(ResultsError, match=message) as caught:
        load_trials([tmp_path])
    assert "seed-1" in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_that_holds_nothing_is_as_none(tmp_path: Path) -> None:
    (write_trial(tmp_path, "plain", "diloco", 1, CURVE) / "recipe.yaml").write_text("")
    assert only(tmp_path).method is None


def test_costs_are_interpolated_between_validations(tmp_path: Path) -> None:
    trial = one(tmp_path, CURVE)
    # From 6.0 after 20 s, 1000 tokens and 2200 bytes to 5.0 after 60 s, 2000 tokens and 4000 bytes: a quarter of the way.
    assert cost_to_reach(trial, 5.75) == Cost(seconds=30.0, tokens=1250.0, bytes=2650.0)
    assert cost_to_reach(trial, 5.0) == Cost(60.0, 2000.0, 4000.0)
    assert cost_to_reach(trial, 9.0) == Cost(0.0, 0.0, 0.0)
    assert cost_to_reach(trial, 4.99) is None


def test_bytes_are_interpolated_over_steps(tmp_path: Path) -> None:
    # Between 400 bytes at step 4 and 2200 at step 10; and between nothing at the start and 400 at step 4.
    lines = [logged(4, 8.0, 400.0), logged(10, 20.0, 2200.0), validation(7, 14.0, 6.0), validation(1, 2.0, 7.0)]
    assert [validation.cost.bytes for validation in validations(one(tmp_path, lines))] == [1300.0, 100.0]


def test_after_a_loss_that_was_not_finite_the_next_validation_counts_as_it_is(tmp_path: Path) -> None:
    lines = [validation(0, 0.0, 8.0), validation(10, 20.0, None), validation(20, 60.0, 5.0)]
    assert cost_to_reach(one(tmp_path, lines), 5.75) == Cost(60.0, 2000.0, None)


def test_rates_ends_and_times(tmp_path: Path) -> None:
    trial = one(tmp_path, CURVE)
    assert tokens_per_second(trial) == 2000 / 60 and bytes_sent(trial) == 4000.0 and final_loss(trial) == 5.0
    assert time_split(trial) == TimeSplit(computing=35.0, exposed=15.0, waiting=10.0)
    broken = one(tmp_path / "broken", [*CURVE, validation(30, 70.0, None)])
    assert final_loss(broken) is None


def test_a_trial_without_lines_has_no_measures(tmp_path: Path) -> None:
    trial = one(tmp_path, [])
    measures = (tokens_per_second, bytes_sent, final_loss, time_split, on_the_wire)
    assert [measure(trial) for measure in measures] == [None] * 5 and cost_to_reach(trial, 5.0) is None


def test_interface_counters_are_set_beside_what_was_counted(tmp_path: Path) -> None:
    hosts = [{"name": f"host{i}", "sent": 2100, "received": 2000 + i} for i in range(2)]
    wire = on_the_wire(one(tmp_path, CURVE, hosts=hosts))
    assert wire == OnTheWire(counted=4000.0, others=0.0, sent=4200, received=4001) and wire.ratio == 1.05
    assert OnTheWire(counted=3000.0, others=1000.0, sent=4200, received=None).ratio == 1.05
    hosts[1]["sent"] = None
    assert on_the_wire(one(tmp_path / "loopback", CURVE, hosts=hosts)) is None


def write_runs(folder: Path, ends: dict[str, list[tuple[float, float]]], condition: str = "plain") -> None:
    """Straight curves from a loss of 8, by (seconds, final loss) of each seed."""
    for run, seeds in ends.items():
        for seed, (seconds, loss) in enumerate(seeds, 1):
            write_trial(folder, condition, run, seed, straight(seconds, loss))


def test_speed_up_and_its_range(tmp_path: Path) -> None:
    # The target is 4.0, the median of the ends. The baseline's seeds are there after 90 and 100 s, its third one never is;
    # edit's curves fall by 4 in the seconds given, so they are there at their ends.
    ends = {"synchronous": [(100, 4.0), (90 * 5 / 4, 3.0), (80, 4.2)], "edit": [(20, 4.0), (25, 4.0), (18, 4.0)]}
    write_runs(tmp_path, ends)
    runs = results_of(tmp_path)
    base, edit = runs["synchronous"], runs["edit"]
    assert base.target == 4.0 and base.standing is Outcome.BASELINE and base.speed_up is None
    assert sorted(base.seconds.values) == [90.0, 100.0, math.inf] and base.seconds.median == 100.0
    assert edit.seconds.values == (20.0, 25.0, 18.0) and edit.standing is Outcome.FASTER
    speed = edit.speed_up
    assert (speed.median, speed.low, speed.high) == (100 / 20, 90 / 25, 100 / 18) and speed.is_range


def test_ranges_that_overlap_are_no_difference(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0), (120, 4.0)], "edit": [(60, 4.0), (105, 4.0)]})
    edit = results_of(tmp_path)["edit"]
    assert edit.standing is Outcome.NO_DIFFERENCE
    assert edit.speed_up.low < 1 < edit.speed_up.high


def test_slower_and_never(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)], "slow": [(200, 4.0)], "worse": [(50, 6.0)]})
    runs = results_of(tmp_path)
    assert runs["slow"].standing is Outcome.SLOWER and runs["slow"].speed_up.median == 0.5
    assert not runs["slow"].speed_up.is_range
    assert runs["worse"].standing is Outcome.NOT_REACHED and runs["worse"].speed_up is None
    # The baseline was at 6.0 after 50 s, halfway from 8 to 4: as soon as the run that ends there.
    assert runs["worse"].own_speed_up.median == 1.0


def test_what_most_seeds_do_not_reach_has_no_speed_up(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)] * 3, "edit": [(10, 4.0), (10, 5.0), (10, 5.0)]})
    edit = results_of(tmp_path)["edit"]
    assert edit.seconds.median == math.inf and edit.speed_up is None and edit.standing is Outcome.MIXED


def test_of_two_seeds_the_target_is_the_one_that_both_reach(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0), (100, 4.4)]})
    base = results_of(tmp_path)["synchronous"]
    assert base.target == 4.4 and sorted(base.seconds.values) == [pytest.approx(90.0), 100.0]


def test_share_of_bytes(tmp_path: Path) -> None:
    write_trial(tmp_path, "plain", "synchronous", 1, straight(100, 4.0, sent=5000.0))
    write_trial(tmp_path, "plain", "edit", 1, straight(50, 2.0, sent=300.0))
    # edit is at 4.0 after two thirds of its way, with 200 of its 300 bytes.
    assert results_of(tmp_path)["edit"].byte_share == pytest.approx(200 / 5000)


def test_failed_trials_count_in_nothing_and_stopped_ones_only_until_they_stopped(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)], "edit": [(20, 4.0)]})
    write_trial(tmp_path, "plain", "edit", 2, straight(1, 1.0), state="failed")
    write_trial(tmp_path, "plain", "edit", 3, straight(10, 4.0), state="stopped")
    edit = results_of(tmp_path)["edit"]
    assert edit.seconds.values == (20.0, 10.0) and edit.rate.values == (50.0, 100.0)
    assert edit.final_loss.values == (4.0,)


def test_a_given_target_and_baseline(tmp_path: Path) -> None:
    write_runs(tmp_path, {"synchronous": [(100, 4.0)], "edit": [(20, 4.0)]})
    runs = results_of(tmp_path, baseline="edit", target=6.0)
    assert runs["edit"].standing is Outcome.BASELINE
    assert runs["synchronous"].seconds.median == 50.0 and runs["synchronous"].speed_up.median == 0.2
    with pytest.raises(ResultsError, match="no run is called 'diloco', the baseline; there are edit, synchronous"):
        results_of(tmp_path, baseline="diloco")


def test_the_baseline_is_the_synchronous_run_else_the_first(tmp_path: Path) -> None:
    write_runs(tmp_path, {"a": [(20, 4.0)], "b": [(20, 4.0)]})
    assert gather(load_trials([tmp_path])).baseline == "a"
    write_trial(tmp_path, "plain", "c", 1, straight(1, 4.0), method="synchronous")
    assert gather(load_trials([tmp_path])).baseline == "c"


@pytest.mark.parametrize(
    "conditions", [["unlimited", "1gbit", "300mbit", "30mbit"], ["nobody", "lag0.2", "lag10"], ["b", "a_1", "a_2"]]
)
def test_without_a_plan_conditions_follow_their_number_from_best_to_worst(
    tmp_path: Path, conditions: list[str]
) -> None:
    for condition in conditions:
        write_runs(tmp_path, {"edit": [(20, 4.0)]}, condition)
    assert [condition.name for condition in gather(load_trials([tmp_path])).conditions] == conditions


@pytest.mark.parametrize(
    ("names", "families"),
    [
        (["100mbit", "1gbit", "unlimited"], [{"100mbit": 100.0, "1gbit": 1000.0, "unlimited": None}]),
        (["30_Mbit", "2.5gbit/s"], [{"30_Mbit": 30.0, "2.5gbit/s": 2500.0}]),
        (["host3-lag-1", "host3-lag-2"], [{"host3-lag-1": 1.0, "host3-lag-2": 2.0}]),
        (
            ["nobody", "one_0.2s", "one_1s", "all_0.2s", "all_1s"],
            [{"nobody": None, "one_0.2s": 0.2, "one_1s": 1.0}, {"nobody": None, "all_0.2s": 0.2, "all_1s": 1.0}],
        ),
        (["fast", "slow", "100mbit", "10mbit"], [{"100mbit": 100.0, "10mbit": 10.0}]),
        (["host1-lag-1", "host2-lag-2"], []),
        (["100mbit", "100mbit-slow"], []),
        (["100mbit", "slow"], []),
    ],
)
def test_conditions_that_differ_in_one_number(names: list[str], families: list[dict[str, float | None]]) -> None:
    assert [scale.numbers for scale in find_sweeps(names)] == families
