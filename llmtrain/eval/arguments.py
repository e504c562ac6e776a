"""Arguments of `llmtrain eval`, checked before torch, transformers or lm-evaluation-harness is imported, which takes far
longer than to find a typing mistake."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.eval.evaluated_checkpoint import check_model_path, labels
from llmtrain.export.request import Step
from llmtrain.files import nearest_existing
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
    if baseline is not None:
        check_model_path(baseline, None)
    if out is not None:
        _check_out(out)


def _check_out(folder: Path) -> None:
    """Raise UserError unless `folder` exists, or can be made, and can be written."""
    there = nearest_existing(folder)
    if not there.is_dir():
        raise UserError(f"--out {folder}: {there} is a file; choose another folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"--out {folder}: {there} can't be written; choose another folder")
