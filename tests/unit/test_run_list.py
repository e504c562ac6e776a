"""Tests of `llmtrain runs`: the rows of runs in every state, and the table."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llmtrain.cli import main
from llmtrain.recipe_loader import load_recipe
from llmtrain.run_list import RunRow, find_runs, show_runs
from llmtrain.train.run_dir import RunDirectory

RECIPE = Path(__file__).parents[2] / "recipes" / "edit_llama_stdlib.yaml"
LINES = [
    {"step": 0, "eval/loss": 7.5},
    {"step": 10, "train/loss": 6.25},
    {"step": 20, "train/loss": 5.5, "eval/loss": 5.75},
    {"step": 30, "train/loss": 5.25},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def written(folder: Path, name: str, stopped: str | None, *keys: str) -> RunDirectory:
    """Return a run directory as training leaves it. If `stopped` is None, the run was killed."""
    recipe = load_recipe(RECIPE, [f"run.out_dir={folder}", f"run.name={name}", "train.steps=40", *keys])
    directory = RunDirectory(recipe)
    directory.claim()
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 40, "tra')
    if stopped is not None:
        directory.write_summary({"stopped": stopped, "steps": 40 if stopped == "done" else 30})
    return directory


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["runs", *arguments])
    output = capsys.readouterr()
    return left.value.code or 0, output.out, output.err


def test_states_losses_steps_and_sizes(folder: Path) -> None:
    opened = [written(folder, f"run_{stopped}", stopped) for stopped in ("done", "signal", "error", None)]
    running = opened[0]
    rows = {row.name: row for row in find_runs(folder)}
    assert {name: row.state for name, row in rows.items()} == dict.fromkeys(rows, "running"), (
        "this process has the locks"
    )
    for directory in opened[1:]:
        directory.__dict__.clear()
    rows = {row.name: row for row in find_runs(folder)}
    assert {name: row.state for name, row in rows.items()} == {
        "run_done": "running",
        "run_signal": "stopped",
        "run_error": "failed",
        "run_None": "failed",
    }
    row = rows["run_signal"]
    assert (row.method, row.steps, row.total_steps) == ("edit", 30, 40)
    assert (row.train_loss, row.validation_loss, row.validation_step) == (5.25, 5.75, 20)
    assert row.bytes == sum(path.stat().st_size for path in (folder / "run_signal").iterdir())
    assert 0 <= row.age_seconds < 60
    running.__dict__.clear()
    assert {row.name: row.state for row in find_runs(folder)}["run_done"] == "done"


def test_the_newest_is_last_and_a_runs_own_folders_are_no_runs(folder: Path) -> None:
    for name, age in (("b", 7200), ("a", 3 * 86400), ("c", 60)):
        path = written(folder / "compared" if name == "a" else folder, name, "done").path
        (path / "export").mkdir()
        (path / "export" / "recipe.yaml").write_text("")
        for file in path.glob("*.*"):
            os.utime(file, (time.time() - age,) * 2)
    assert [row.name for row in find_runs(folder)] == ["compared/a", "b", "c"]
    assert [row.name for row in find_runs(folder / "b")] == ["b"], "the folder may also be that of one run"


def test_what_is_damaged_or_missing_is_left_open(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(folder, "old", None, "sync.method=diloco").path
    (path / "recipe.yaml").write_text("optim: {a key of another version: 1}")
    (path / "metrics.jsonl").unlink()
    (path / "summary.json").write_text("{")
    (row,) = find_runs(folder)
    assert (row.method, row.total_steps, row.train_loss, row.steps) == (None, None, None, 0)
    code, out, _ = listed(capsys, str(folder))
    assert code == 0 and out.splitlines()[1].split()[:6] == ["old", "?", "0", "-", "-", "-"]


def test_a_loss_before_the_end_has_its_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is stopped before its first regular validation has only the loss of its random weights."""
    path = written(folder, "early", "signal").path
    lines = [{"step": 0, "eval/loss": 7.5}, {"step": 30, "train/loss": 5.25}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "7.5000 at 0 " in listed(capsys, str(folder))[1]
    (path / "metrics.jsonl").write_text(json.dumps({"step": 30, "eval/loss": 5.5}) + "\n")
    assert " at " not in listed(capsys, str(folder))[1], "the loss of the last step needs no step"


def test_the_best_checkpoint_has_a_column(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(folder, "a", "done").path
    assert find_runs(folder)[0].best_step is None
    for step, loss in ((10, 5.5), (20, 5.25), (30, 5.75)):
        checkpoint = path / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        ranks = [{"last_eval": {"loss": loss, "tokens": 1000}, "last_evaluated": step}]
        (checkpoint / "state.json").write_text(json.dumps({"step": step, "ranks": ranks}))
    (path / "checkpoints" / "step-00000040").mkdir()
    (row,) = find_runs(folder)
    assert (row.best_step, row.best_loss) == (20, 5.25)
    assert "5.2500 at 20 " in listed(capsys, str(folder))[1]


def test_what_may_not_be_read_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read every folder. So os.scandir is replaced by a function that refuses."""
    written(folder, "a", "done")
    (folder / "locked" / "b").mkdir(parents=True)
    locked, scan = str(folder / "locked"), os.scandir

    def refuse(path: str) -> Any:
        if os.fspath(path).startswith(locked):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [row.name for row in find_runs(folder)] == ["a"]


def test_a_pipe_gets_plain_columns_and_json_all_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder, "a-rather-long-name-" * 5, "done")
    _, out, _ = listed(capsys, str(folder))
    head, row = out.splitlines()
    assert head.split() == [
        "name",
        "method",
        "steps",
        "train",
        "loss",
        "val.",
        "loss",
        "best",
        "checkpoint",
        "state",
        "size",
        "last",
        "written",
    ]
    assert row.split()[:7] == ["a-rather-long-name-" * 5, "edit", "40/40", "5.2500", "5.7500", "at", "20"]
    assert row.rstrip().endswith(" ago") and "\x1b" not in out
    (values,) = json.loads(listed(capsys, str(folder), "--json")[1])
    assert values.keys() == RunRow.__annotations__.keys() and values["validation_loss"] == 5.75


def test_a_terminal_gets_a_table_with_colors() -> None:
    row = RunRow("a", "edit", 1, 2, 1.0, None, None, None, None, "failed", 2048, 7300.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard")
    show_runs([row], console)
    text = console.file.getvalue()
    assert "\x1b[31mfailed" in text and "─" in text and "2.0 kB" in text and "2 hours ago" in text


@pytest.mark.parametrize(
    ("made", "code", "words"), [(None, 2, "does not exist"), ("file", 2, "is not a folder"), ("folder", 0, "no runs")]
)
def test_nothing_to_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str | None, code: int, words: str
) -> None:
    path = tmp_path / "here"
    if made == "file":
        path.touch()
    elif made == "folder":
        path.mkdir()
    found: tuple[int, Any, Any] = listed(capsys, str(path))
    assert found[0] == code and words in found[1] + found[2]


@pytest.mark.fresh
def test_the_list_does_not_wait_for_torch(folder: Path) -> None:
    folder.mkdir()
    command = [sys.executable, "-X", "importtime", "-m", "llmtrain", "runs", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "llmtrain.run_list" in modules and not modules & {"torch", "transformers", "datasets"}
