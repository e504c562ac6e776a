"""A comparison ends at an interruption, wherever it arrives, and says how long its missing trials take."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.compare import runner
from llmtrain.errors import STOPPED_EARLY

RECIPE = Path(__file__).parents[2] / "recipes" / "edit_llama_stdlib.yaml"
FILE = f"""
recipe: {RECIPE}
overrides: [train.steps=60]
out_dir: runs
hosts: {{count: 2}}
runs: {{synchronous: {{overrides: [sync.method=synchronous, sync.warmup_steps=0]}}, diloco: }}
"""


class Interrupted:
    """What is interrupted as it goes away: Python reports the exception and drops it, as in callbacks of its imports."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_python_drops_ends_it_before_the_next_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    file, made = tmp_path / "small.yaml", []

    def make(planned: Any, *_: Any) -> Any:
        made.append(planned.run)
        return SimpleNamespace(wall_seconds=1.0, state="done", last_lines=[])

    def report(*_: Any) -> Path:
        if len(made) == 1:
            Interrupted(number)
        return tmp_path

    file.write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_make", make)
    monkeypatch.setattr(runner, "write_report", report)
    monkeypatch.setattr(runner, "_results", lambda *_: None)
    monkeypatch.setattr(runner, "_seconds_left", lambda *_: 0.0)
    monkeypatch.setattr(runner, "prepare_for", lambda *_, **__: SimpleNamespace(vocab_size=400))
    monkeypatch.setattr(runner, "recipe_warnings", lambda *_: ["what a run says"])
    before = signal.getsignal(number)
    assert runner.run_comparison(file, (), shaping=False, retry=False) == STOPPED_EARLY
    said = capsys.readouterr().out
    assert made == ["synchronous"] and "start the same command again" in said
    assert said.count("warning: runs.diloco: what a run says") == said.count("warning: runs.synchronous") == 1
    assert signal.getsignal(number) is before


def test_the_time_left_includes_trials_to_repeat_and_no_failure_shortens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each trial takes 600 seconds, unless it fails after two."""
    file, failing = tmp_path / "small.yaml", {("synchronous", 1), ("synchronous", 2), ("diloco", 2)}

    def make(planned: Any, *_: Any) -> Any:
        state, seconds = ("failed", 2.0) if (planned.run, planned.seed) in failing else ("done", 600.0)
        planned.directory.mkdir(parents=True, exist_ok=True)
        (planned.directory / "trial.json").write_text(json.dumps({"state": state, "wall_seconds": seconds}))
        return SimpleNamespace(wall_seconds=seconds, state=state, last_lines=[])

    def times_left(retry: bool) -> list[str]:
        runner.run_comparison(file, (), shaping=False, retry=retry)
        ends = [line for line in capsys.readouterr().out.splitlines() if "done in" in line or "failed in" in line]
        return [end.partition("; ")[2] for end in ends]

    file.write_text(FILE + "seeds: [1, 2]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_make", make)
    monkeypatch.setattr(runner, "write_report", lambda *_: tmp_path)
    monkeypatch.setattr(runner, "_results", lambda *_: None)
    monkeypatch.setattr(runner, "prepare_for", lambda *_, **__: SimpleNamespace(vocab_size=400))
    assert times_left(retry=False) == ["", "about 20.0 min left", "about 10.0 min left", ""], (
        "a failure alone says nothing"
    )
    failing.clear()
    assert times_left(retry=True) == ["about 20.0 min left", "about 10.0 min left", ""]
