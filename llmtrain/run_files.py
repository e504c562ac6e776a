"""Names of the files in a run directory, and the list of its complete checkpoints. Imports no torch, so that commands that only
look at a run answer at once."""

from __future__ import annotations

import re
from pathlib import Path

RECIPE, METRICS, SUMMARY, LOCK = "recipe.yaml", "metrics.jsonl", "summary.json", ".lock"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""
LATEST = "latest"
"""File beside checkpoints that names the newest one."""
STATE_FILE = "state.json"
"""File of a checkpoint that holds its state without the tensors. It is written last."""
EXPORT_MANIFEST = "export.json"
"""File of an exported model that lists its files."""
EVALUATIONS = "eval"
"""Folder of results of `llmtrain eval`."""
STEP_NAME = re.compile(r"step-(\d{8})")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory."""
    return (folder / RECIPE).is_file()


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder. The names of its export and of its evaluations' files contain it, too."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_folders(directory: Path) -> list[Path]:
    """Return every checkpoint in a `checkpoints` folder, oldest first, including those that have lost their
    state.json."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in paths if STEP_NAME.fullmatch(path.name))


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a `checkpoints` folder by step, oldest first. A folder that may not be read has none."""
    found = sorted(path.parent for path in directory.glob(f"step-{'[0-9]' * 8}/{STATE_FILE}"))
    return {step_of(path): path for path in found}
