"""Checks before an evaluation: lm-evaluation-harness is installed, and the recipe's suite and its data exist."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from llmtrain.config import SuiteSection
from llmtrain.errors import UserError
from llmtrain.suites.local_tasks import data_file, local_tasks
from llmtrain.suites.suite import Suite, load_suite

KEY = "eval.suite"


def harness_version() -> str:
    """Return the version of the installed lm-evaluation-harness. Raises UserError, with the command to install
    it, if it is missing."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "lm-evaluation-harness is not installed; install it with: pip install -c constraints.txt -e '.[eval]'"
        ) from None


def check_suite(section: SuiteSection | None) -> None:
    """Raise UserError if a recipe's suite is invalid or lacks a data folder. Reads no data, so a laptop can
    check a cluster's recipe. Names of lm-evaluation-harness's own tasks are not checked, because listing them
    takes many seconds."""
    if section is not None:
        _, suite, folders = load_suite(section.name, f"{KEY}.name")
        if section.data_dir is None:
            for file, needed_by in _local_files(suite, folders):
                data_file(None, file, needed_by, f"{KEY}.data_dir")


def check_suite_data(section: SuiteSection | None) -> None:
    """Raise UserError if evaluating a recipe's suite would fail on this machine because lm-evaluation-harness
    or a data file is missing."""
    if section is not None:
        _, suite, folders = load_suite(section.name, f"{KEY}.name")
        if suite.tasks:
            harness_version()
        for file, needed_by in _local_files(suite, folders):
            data_file(Path(section.data_dir) if section.data_dir else None, file, needed_by, f"{KEY}.data_dir")


def _local_files(suite: Suite, folders: list[Path]) -> list[tuple[str, str]]:
    """Return pairs (file relative to the data folder, task or text that reads it)."""
    local = local_tasks(folders)
    found = [
        (file, f"task {task.task}") for task in suite.tasks if task.task in local for file in local[task.task].files
    ]
    return found + [(text.file, f"text {text.name}") for text in suite.texts]
