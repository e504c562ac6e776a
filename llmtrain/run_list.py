"""List of the run directories in a folder: what each run trains, how far it is, and whether it still runs.

Reads the files that a run writes (`train/run_dir.py`) without importing torch, so that the list appears at once.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from llmtrain.checkpoint_retention import best_step, read_losses
from llmtrain.console_table import output_table
from llmtrain.errors import ResultsError, UserError
from llmtrain.quantities import format_duration
from llmtrain.recipe_loader import load_recipe
from llmtrain.run_files import CHECKPOINTS, LOCK, METRICS, RECIPE, SUMMARY
from llmtrain.waiting import announced

STATES = {"done": "done", "signal": "stopped"}
"""State of a run that has ended, by the word in summary.json. Another word, or no summary, means that the run failed."""
STYLES = {"done": "green", "running": "cyan", "stopped": "yellow", "failed": "red"}
KINDS = {"method": str, "steps": int, "stopped": str}
"""Types of the values in summary.json, by name. A value of another type is ignored."""


@dataclass(frozen=True)
class RunRow:
    """Facts about a run, read from its files."""

    name: str
    """Path below the listed folder."""
    method: str | None
    """None if the recipe can't be read, for example because another version wrote it."""
    steps: int
    total_steps: int | None
    train_loss: float | None
    validation_loss: float | None
    """Last validation loss."""
    validation_step: int | None
    """Step at which `validation_loss` was measured. In a run that was stopped, it may be far before the last step."""
    best_loss: float | None
    """Validation loss of the best checkpoint."""
    best_step: int | None
    """Step of the best checkpoint, which `--step best` selects. None if no checkpoint was validated at its own step."""
    state: str
    """`done`, `running`, `stopped` (with a checkpoint, by a signal) or `failed`."""
    bytes: int
    age_seconds: float
    """Seconds since the run last wrote its recipe, metrics or summary."""

    @property
    def validated_before_end(self) -> int | None:
        """Step of the last validation if the run has trained since; None otherwise."""
        return self.validation_step if self.validation_step != self.steps else None


def find_runs(folder: Path) -> list[RunRow]:
    """Return the runs in a folder and its subfolders, sorted by the time at which they were last written. Raises ResultsError if
    `folder` is not a folder."""
    if not os.path.isdir(folder):
        what = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise ResultsError(f"{folder} {what}; give the folder of the run directories (run.out_dir, by default runs)")
    with announced(f"all folders below {folder} to be searched for runs"):
        rows = [read_run(path, name_below(folder, path)) for path in run_directories(folder)]
    return sorted(rows, key=lambda row: -row.age_seconds)


def read_run(path: Path, name: str) -> RunRow:
    """Return the row of one run directory."""
    last, steps = _last_values(path / METRICS, ("step", "train/loss", "eval/loss"))
    losses = read_losses(path / CHECKPOINTS)
    best = best_step(losses)
    summary = {
        name: value for name, value in _summary(path / SUMMARY).items() if isinstance(value, KINDS.get(name, object))
    }
    try:
        recipe = load_recipe(path / RECIPE)
        method, total = recipe.sync.method, recipe.train.total_steps
    except UserError:
        method, total = summary.get("method"), None
    return RunRow(
        name=name,
        method=method,
        steps=int(summary.get("steps", last.get("step", 0))),
        total_steps=total,
        train_loss=last.get("train/loss"),
        validation_loss=last.get("eval/loss"),
        validation_step=steps.get("eval/loss"),
        best_loss=losses[best].loss if best is not None else None,
        best_step=best,
        state="running" if is_locked(path) else STATES.get(summary.get("stopped", ""), "failed"),
        bytes=_size_of(path),
        age_seconds=max(0.0, time.time() - _last_written(path)),
    )


def show_runs(rows: list[RunRow], console: Console) -> None:
    """Print a table with a row per run: with colors on a terminal, as plain columns elsewhere."""
    table = output_table(console)
    for head in (
        "name",
        "method",
        "steps",
        "train loss",
        "val. loss",
        "best checkpoint",
        "state",
        "size",
        "last written",
    ):
        justify = "left" if head in ("name", "method", "state", "last written") else "right"
        table.add_column(head, justify=justify, overflow="fold", no_wrap=head != "name")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


def as_json(rows: list[RunRow]) -> str:
    """Return the rows as a JSON list of objects with the fields of RunRow."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def _cells(row: RunRow) -> list[str]:
    state = f"[{STYLES[row.state]}]{row.state}[/]"
    steps = f"{row.steps:,}" + (f"/{row.total_steps:,}" if row.total_steps is not None else "")
    losses = [
        loss_in_words(row.train_loss),
        loss_in_words(row.validation_loss, row.validated_before_end),
        loss_in_words(row.best_loss, row.best_step),
    ]
    age = f"{format_duration(row.age_seconds)} ago"
    return [row.name, row.method or "?", steps, *losses, state, decimal(row.bytes), age]


def loss_in_words(loss: float | None, step: int | None = None) -> str:
    """Return a loss as text, with the step at which it was measured unless `step` is None; "-" if there is no loss."""
    if loss is None:
        return "-"
    return f"{loss:.4f}" + ("" if step is None else f" at {step:,}")


def run_directories(folder: Path) -> Iterator[Path]:
    """Yield the folders that hold a run's recipe. Folders inside such a folder, and folders that may not be read, are left
    out."""
    for path, below, files in os.walk(folder):
        if RECIPE in files:
            yield Path(path)
        below[:] = [] if RECIPE in files else sorted(below)


def name_below(folder: Path, path: Path) -> str:
    """Return the path of a run relative to `folder`, or the folder's name if it is the run itself."""
    return path.resolve().name if path == folder else path.relative_to(folder).as_posix()


def _last_values(path: Path, tags: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (last finite number, its step) of each tag in a metrics.jsonl, as two mappings by tag. Tags without a number and
    damaged lines are left out."""
    found: dict[str, float] = {}
    steps: dict[str, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:  # nothing is logged yet, or the file may not be read
        return found, steps
    for text in reversed(lines):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            new = {tag: line[tag] for tag in tags if tag not in found and is_number(line.get(tag))}
            found |= new
            if is_number(line.get("step")):
                steps |= dict.fromkeys(new, int(line["step"]))
        if len(found) == len(tags):
            break
    return found, steps


def is_number(value: object) -> bool:
    """Return whether a value from a JSON file is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def is_locked(run: Path) -> bool:
    """Return whether a process works in a run directory, according to the directory's lock. The lock is not changed."""
    try:
        with (run / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except BlockingIOError:
        return True
    except OSError:  # no lock, or a file system without locks
        return False
    return False


def _last_written(run: Path) -> float:
    """Return when a run last wrote its recipe, metrics or summary, as a Unix time."""
    times = []
    for name in (RECIPE, METRICS, SUMMARY):
        try:
            times.append(os.stat(run / name).st_mtime)
        except OSError:
            continue
    return max(times, default=time.time())


def _size_of(path: Path) -> int:
    """Return the bytes of all files below a folder. Files that vanish during the count are left out."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
