"""Loading of all tasks of a suite without a model: `python -m llmtrain.eval.fetch SUITE [DATA_DIR]`. Afterwards, the hub's cache has
their datasets."""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain.errors import exit_with_status
from llmtrain.eval.harness import check_tasks, load_task, quiet, task_manager
from llmtrain.suites import load_suite
from llmtrain.task_files import local_tasks


def fetch(suite: str, data_dir: Path | None = None) -> None:
    """Load every task of a suite. Raises UserError, which names the task, if one is unknown or its data is not available."""
    _, chosen, folders = load_suite(suite)
    names, local = [task.task for task in chosen.tasks], local_tasks(folders)
    complete = [name for name, task in local.items() if task.is_complete]
    check_tasks(names, complete, tuple(folders), data_dir)
    with quiet():
        for name in names:
            manager = task_manager(tuple(folders), data_dir, name not in complete)
            load_task(name, manager, is_local=name in local and bool(local[name].files))


if __name__ == "__main__":
    exit_with_status(lambda: fetch(sys.argv[1], *map(Path, sys.argv[2:])))
