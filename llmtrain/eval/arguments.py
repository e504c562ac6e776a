"""Checks of the arguments of `llmtrain eval`. They import neither torch nor transformers nor lm-evaluation-harness, so that a typing
mistake is reported at once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.eval.evaluated_checkpoint import check_can_write, check_model_path, labels, same
from llmtrain.export.request import Step
from llmtrain.run_files import EVALUATIONS
from llmtrain.suites import check_device_name, check_local_files, harness_version, load_suite


def check_arguments(
    paths: Sequence[Path],
    suite: str,
    *,
    over_time: bool = False,
    step: Step | None = None,
    data_dir: Path | None = None,
    device: str | None = None,
    baseline: Path | None = None,
    out: Path | None = None,
) -> None:
    """Raise UserError, with a one-line message, for a suite, run, step, device or folder that does not exist.

    Names of lm-evaluation-harness's own tasks are not checked, because listing them takes many seconds.
    """
    if over_time and step is not None:
        raise UserError("--over-time is for all checkpoints and --step for one; leave one of them out")
    if device is not None:
        check_device_name(device, "--device")
    _, chosen, task_folders = load_suite(suite)
    if chosen.tasks:
        harness_version()
    check_local_files(chosen, task_folders, data_dir, "--data-dir")
    labels(paths)
    for path in paths:
        check_model_path(path, step)
        check_can_write(out or path / EVALUATIONS)
    everything = [*paths]
    if baseline is not None:
        check_model_path(baseline, None)
        everything += [baseline] if same(baseline, paths) is None else []
    for path, label in zip(everything, labels(everything), strict=True) if out is not None else ():
        _check_owner(out / label, path)


def _check_owner(folder: Path, path: Path) -> None:
    """Raise UserError if `folder` has results of another model or run than `path`, and that model still exists."""
    for file in sorted(folder.glob("*.json")):
        try:
            other = Path(json.loads(file.read_text(encoding="utf-8"))["model"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if os.path.exists(other) and path.resolve() not in (other.resolve(), *other.resolve().parents):
            raise UserError(f"{folder} has results of {other}; choose another folder with --out for those of {path}")
