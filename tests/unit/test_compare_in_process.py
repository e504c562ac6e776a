"""Tests of comparisons of runs whose replicas take turns in one process."""

from __future__ import annotations

from pathlib import Path

import yaml

from llmtrain.compare import report
from llmtrain.compare.measures import SPLIT
from llmtrain.compare.plots import draw_time
from llmtrain.compare.results import load_trials
from tests.unit.test_compare_report import SYNCHRONOUS, headline, results_of, rows, write
from tests.unit.written_trials import straight, validation, write_trial


def in_process(folder: Path, **parallel: object) -> None:
    """Change the recipes of all trials so that their replicas take turns in one process."""
    for path in folder.rglob("recipe.yaml"):
        recipe = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(recipe | {"parallel": {"in_process": True, **parallel}}))


def test_replicas_that_take_turns_have_no_times_to_compare(tmp_path: Path) -> None:
    write(tmp_path, synchronous=SYNCHRONOUS, edit=[(20.0, 4.0), (22.0, 4.0), (25.0, 4.0)])
    in_process(tmp_path)
    assert headline(tmp_path) == (
        "Replicas that take turns in one process have no times to compare: see losses, tokens and bytes"
    )
    row = rows(tmp_path)["edit"]
    assert {key for key, value in row.items() if value == report.NOTHING} == {
        *("time to loss 4.000", "speed-up", "speed-up to its own final loss", "tokens/s", "training time"),
    }
    assert (row["outcome"], row["final loss"], row["tokens to loss 4.000"]) == ("not comparable", "4.000", "1 k")
    assert row["of the baseline's bytes"] == "2 % (3 seeds)"
    text = report.write_report(results_of(tmp_path), tmp_path / "report").with_suffix(".md").read_text()
    assert "loss_tokens-plain.png" in text and "loss_seconds-plain.png" not in text


def test_times_of_a_virtual_clock_are_compared(tmp_path: Path) -> None:
    """The time of a validation before the first line with a virtual time is interpolated. Waits are real seconds of one process, so
    they are not parts of a virtual time."""
    for run, end in (("synchronous", 100.0), ("edit", 20.0)):
        lines = straight(7.0, 4.0)
        lines[1]["perf/virtual_seconds"] = end
        write_trial(tmp_path, "plain", run, 1, [*lines[:1], validation(5, 3.0, 6.0), *lines[1:]])
    in_process(tmp_path, virtual_clock={"step_seconds": [1, 1]})
    [trial] = [trial for trial in load_trials([tmp_path]) if trial.run == "edit"]
    assert [line["seconds"] for line in trial.lines] == [0.0, 10.0, 20.0, 20.0]
    assert headline(tmp_path).startswith(
        "Fastest to synchronous's final loss 4.000: edit under plain, 5.0 times as fast"
    )
    results = results_of(tmp_path)
    assert results.trials[SPLIT].isna().all(axis=None) and draw_time(results, "plain") is None
