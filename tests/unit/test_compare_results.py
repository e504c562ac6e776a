"""Tests of reading trials, and of the measures computed from them. Every expected number was worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llmtrain.compare.measures import (
    COSTS,
    SPLIT,
    WIRE,
    cost_to_reach,
    find_sweeps,
    measure,
    validations,
)
from llmtrain.compare.results import Trial, load_trials
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
    assert trial.exit_codes == [0, None] and trial.overrides == ["a=1"] and trial.commit == "abc"
    assert (trial.hosts, trial.wall_seconds) == (hosts, 3.5)
    assert len(trial.lines) == len(CURVE) and not trial.averages_every_step and trial.spans.empty


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
    assert (trial.state, trial.method, trial.lines, trial.last_lines) == ("failed", None, (), ["error: no such file"])


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
    assert only(tmp_path).spans.values.tolist() == [[2, "step", 4, 1.0, 2.0], [2, "message", 4, 2.0, 3.0]]


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    path = write_trial(tmp_path, "plain", "diloco", 1, CURVE)
    assert len(load_trials([tmp_path, path, tmp_path])) == 1


def test_directories_that_hold_nothing_are_named(tmp_path: Path) -> None:
    write_trial(tmp_path / "full", "plain", "diloco", 1, CURVE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ResultsError, match=r"empty contains no finished run \(trial\.json, or metrics\.jsonl and recipe\.yaml\)"
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
        ("trial.json", b"{", r"trial\.json is damaged \(.*\); delete the trial to run it again"),
        ("trial.json", b'{"run": "\xff"}', r"trial\.json is damaged \(.*can't decode byte 0xff.*\); delete the trial"),
        ("trial.json", b"[]", r"trial\.json holds no mapping; delete the trial"),
        (
            "trial.json",
            b'{"hosts": [7]}',
            r"seed-1 is not a valid trial \(1 validation error .*\); delete the trial",
        ),
        ("recipe.yaml", b"run: [\nsync:", r"recipe\.yaml is damaged \(while parsing a flow .*\); delete the trial"),
        ("recipe.yaml", b"run: \xff", r"recipe\.yaml is damaged \(.*can't decode byte 0xff.*\); delete the trial"),
        ("recipe.yaml", b"sync: edit", r"seed-1 is not a valid trial"),
    ],
    ids=["cut off", "binary", "a list", "a host that is none", "cut off recipe", "binary recipe", "no section"],
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
    # 5.75 is a quarter of the way from 6.0 (20 s, 1000 tokens, 2200 bytes) to 5.0 (60 s, 2000 tokens, 4000 bytes).
    for loss, costs in {5.75: [30, 1250, 2650], 5.0: [60, 2000, 4000], 9.0: [0, 0, 0], 4.99: [math.inf] * 3}.items():
        assert list(cost_to_reach(trial, loss)[COSTS]) == costs


def test_bytes_are_interpolated_over_steps(tmp_path: Path) -> None:
    # Step 7 is halfway between 400 bytes at step 4 and 2200 at step 10, and step 1 is between 0 at the start and 400.
    lines = [logged(4, 8.0, 400.0), logged(10, 20.0, 2200.0), validation(7, 14.0, 6.0), validation(1, 2.0, 7.0)]
    assert list(validations(one(tmp_path, lines))["bytes"]) == [1300.0, 100.0]


def test_after_a_loss_that_was_not_finite_the_next_validation_counts_as_it_is(tmp_path: Path) -> None:
    lines = [validation(0, 0.0, 8.0), validation(10, 20.0, None), validation(20, 60.0, 5.0)]
    assert cost_to_reach(one(tmp_path, lines), 5.75)[COSTS].fillna(-1).tolist() == [60.0, 2000.0, -1]


def test_rates_ends_and_times(tmp_path: Path) -> None:
    found = measure(one(tmp_path, CURVE))
    assert (found["tokens_per_second"], found["bytes_sent"], found["final_loss"]) == (2000 / 60, 4000.0, 5.0)
    assert [found[part] for part in SPLIT] == [35.0, 15.0, 10.0] and found["training_seconds"] == 60.0
    broken = measure(one(tmp_path / "broken", [*CURVE, validation(30, 70.0, None)]))
    assert math.isnan(broken["final_loss"])


def test_a_trial_without_lines_has_no_measures(tmp_path: Path) -> None:
    trial = one(tmp_path, [])
    assert not [value for value in measure(trial).values() if value is not None]
    assert cost_to_reach(trial, 5.0).isna().all()


def test_interface_counters_are_set_beside_what_was_counted(tmp_path: Path) -> None:
    hosts = [{"name": f"host{i}", "sent": 2100, "received": 2000 + i} for i in range(2)]
    found = measure(one(tmp_path, CURVE, hosts=hosts))
    assert [found[name] for name in WIRE] == [4000.0, 0.0, 4200, 4001, 1.05]
    others = [line | {"comm/other_bytes_total": 200.0} for line in CURVE if "comm/bytes_total" in line]
    assert measure(one(tmp_path / "others", others, hosts=hosts))["wire_ratio"] == 1.0
    stopped = measure(one(tmp_path / "stopped", CURVE, hosts=hosts, state="stopped"))
    assert not set(WIRE) & set(stopped), "the counters went on after the last logged line"
    hosts[1]["sent"] = None
    assert not set(WIRE) & set(measure(one(tmp_path / "loopback", CURVE, hosts=hosts)))


@pytest.mark.parametrize(
    ("names", "families"),
    [
        (["100mbit", "1gbit", "unlimited"], [{"100mbit": 100.0, "1gbit": 1000.0, "unlimited": math.inf}]),
        (["30_Mbit", "2.5gbit/s"], [{"30_Mbit": 30.0, "2.5gbit/s": 2500.0}]),
        (["host3-lag-1", "host3-lag-2"], [{"host3-lag-1": 1.0, "host3-lag-2": 2.0}]),
        (
            ["nobody", "one_0.2s", "one_1s", "all_0.2s", "all_1s"],
            [
                {"nobody": -math.inf, "one_0.2s": 0.2, "one_1s": 1.0},
                {"nobody": -math.inf, "all_0.2s": 0.2, "all_1s": 1.0},
            ],
        ),
        (["fast", "slow", "100mbit", "10mbit"], [{"100mbit": 100.0, "10mbit": 10.0}]),
        (["host1-lag-1", "host2-lag-2"], []),
        (["a", "9mbit_1ms", "9mbit_2ms"], [{"a": -math.inf, "9mbit_1ms": 1.0, "9mbit_2ms": 2.0}]),
        (["100mbit", "100mbit-slow"], []),
        (["100mbit", "slow"], []),
    ],
)
def test_conditions_that_differ_in_one_number(names: list[str], families: list[dict[str, float]]) -> None:
    assert [scale.numbers for scale in find_sweeps(names)] == families


NESTED = (("gradient", 1.0, 2.0), ("step", 0.5, 3.0))
"""Nested spans as (kind, start, end), the inner span first."""


def test_bytes_received_are_known_where_all_hosts_tell(tmp_path: Path) -> None:
    hosts = [{"name": "one", "sent": 50, "received": 40}, {"name": "two", "sent": 50, "received": None}]
    write_trial(tmp_path, "plain", "edit", 1, straight(100.0, 4.0), hosts=hosts)
    found = measure(load_trials([tmp_path])[0])
    assert (found["wire_sent"], found["wire_received"]) == (100, None)


def test_a_span_comes_before_those_within_it(tmp_path: Path) -> None:
    """Spans are written when they end, so inner ones come first, but a timeline draws them over the outer ones."""
    path = write_trial(tmp_path, "plain", "edit", 1, straight(100.0, 4.0))
    spans = [{"kind": kind, "name": "", "step": 1, "start": begin, "end": end} for kind, begin, end in NESTED]
    (path / "trace").mkdir()
    (path / "trace" / "rank-00000.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    assert list(load_trials([tmp_path])[0].spans["kind"]) == ["step", "gradient"]
