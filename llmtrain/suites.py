"""Suites: the tasks, texts and prompts of an evaluation, and the data files that they need.

A suite is one of eval/suites/*.yaml or a user's YAML file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from llmtrain.config import SuiteSection
from llmtrain.config.section import Count, Section
from llmtrain.errors import DataError, SuiteError, UserError
from llmtrain.recipe_messages import closest, explain_in, one_of
from llmtrain.task_files import FILES, digest_of, local_tasks, read_yaml

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
FewShot = Annotated[int, Field(ge=0)]
NotEmpty = Annotated[str, Field(min_length=1)]


class TaskSection(Section):
    """A task, group or tag of lm-evaluation-harness, or of the task files in eval/tasks."""

    task: Name
    """Name of the task, for example hellaswag."""
    few_shot: FewShot | None = None
    """Number of examples before each question; null: the number that the task sets, or none."""
    limit: Count | None = None
    """Maximum number of documents, per task of a group; null: all."""
    show: tuple[str, ...] = ("acc",)
    """Metrics in the table and the curves; the JSON has all of them."""


class TextSection(Section):
    """A text file, which may be compressed (`.gz`), on which the loss is measured."""

    name: Name
    """Name in the table."""
    file: str
    """Path below --data-dir."""
    separator: NotEmpty = "<|endoftext|>"
    """Separator between documents."""
    every: Count = 1
    """Interval between the documents that are read, beginning with the first."""
    limit: Count | None = None
    """Maximum number of documents; null: all."""
    window: Annotated[int, Field(ge=2)] | None = None
    """Context length in tokens; null: the length of the model's training sequences, or of its positions if that is shorter or all
    that is known, at most 2048."""
    show: tuple[Literal["loss", "perplexity", "bits_per_byte"], ...] = ("loss", "perplexity", "bits_per_byte")
    """Metrics in the table and the curves."""


class SamplesSection(Section):
    """Texts that the model continues."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Texts to continue."""
    tokens: Count = 120
    """Maximum number of new tokens per prompt."""
    temperature: Annotated[float, Field(gt=0)] = 0.7
    """Sampling temperature."""
    top_k: Count = 40
    """Number of most likely tokens to sample from."""
    seed: int = 0
    """Seed of the sampling."""


class Suite(Section):
    """A list of evaluations that belong together."""

    about: str = ""
    """Purpose of the suite, in one line."""
    batch_size: Count | Literal["auto"] = 16
    """Sequences per forward pass; auto: lm-evaluation-harness determines how many fit into memory."""
    task_folders: tuple[str, ...] = ()
    """Additional folders of task files, relative to the file of the suite."""
    tasks: tuple[TaskSection, ...] = ()
    """Tasks for lm-evaluation-harness."""
    texts: tuple[TextSection, ...] = ()
    """Text files whose loss is measured."""
    samples: SamplesSection | None = None
    """Prompts to continue, for people to read."""


def load_suite(name: str, key: str = "--suite") -> tuple[str, Suite, list[Path]]:
    """Return (name, suite, folders of its task files), given a suite's name in eval/suites or its YAML file.

    `key` is the recipe key or option that gave the name. Raises SuiteError, with a one-line message, if the suite does not exist or
    is invalid.
    """
    path = _path_of(name, key)
    data = read_yaml(path, yaml.SafeLoader, "a suite")
    if not isinstance(data, dict):
        raise SuiteError(f"{path}: is not a mapping; a suite has {', '.join(Suite.model_fields)}")
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        raise SuiteError(f"{path}: {explain_in(Suite, error)}") from None
    if not (suite.tasks or suite.texts or suite.samples):
        raise SuiteError(f"{path}: has nothing to evaluate; give it tasks, texts or samples")
    names = [task.task for task in suite.tasks] + [text.name for text in suite.texts]
    names += ["samples"] if suite.samples else []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise SuiteError(f"{path}: {twice} is listed twice; leave one out, or put it into another suite")
    folders = [path.parent / folder for folder in suite.task_folders]
    if missing := next((folder for folder in folders if not os.path.isdir(folder)), None):
        raise SuiteError(
            f"{path}: task_folders has {missing}, which is not a folder; they are relative to the suite's file"
        )
    return path.stem, suite, [FILES / "tasks", *folders]


def suite_names() -> list[str]:
    """Return the names of the suites that come with the package."""
    return sorted(path.stem for path in (FILES / "suites").glob("*.yaml"))


def _path_of(name: str, key: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):
            raise SuiteError(f"{key} {name}: there is no such file; give one, or {one_of(suite_names())}")
        return Path(name)
    known = suite_names()
    if name not in known:
        if os.path.isfile(name):
            raise SuiteError(
                f"{key} {name}: this file is not a suite; give a file that ends in .yaml and lists tasks, "
                "texts (this file may be one) or samples (eval/README.md)"
            )
        near = closest(name, known)
        hint = f"did you mean {near}?" if near else f"suites are {', '.join(known)}, or a YAML file"
        raise SuiteError(f"{key} {name}: there is no such suite; {hint}")
    return FILES / "suites" / f"{name}.yaml"


def suite_digest(suite: Suite, folders: Sequence[Path]) -> str:
    """Return a digest that changes when a suite or its tasks change."""
    return hashlib.sha256(f"{suite.model_dump_json()}\0{digest_of(folders)}".encode()).hexdigest()[:16]


def data_file(data_dir: Path | None, file: str, needed_by: str, key: str = "--data-dir") -> Path:
    """Return the path of `file` in the data folder that the user gave with `key`. Raises DataError if the
    folder or the file is missing. `needed_by` names the task or text in the message."""
    if data_dir is None:
        raise DataError(f"{needed_by} reads {file}: give the folder that has it with {key}")
    path = data_dir / file
    if not os.path.isfile(path):  # False also for a name that is too long for a file
        what = "has no" if os.path.isdir(data_dir) else "is not a folder, so it has no"
        raise DataError(f"{key} {data_dir} {what} {file}, which {needed_by} reads; see eval/README.md")
    return path


@cache
def content_digest(path: Path, size: int, modified: int) -> str:
    """Return the first 16 hex digits of a file's SHA-256. `size` and `modified` are cache keys, so that a
    changed file is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def digests_of_data(data_dir: Path | None, files: Sequence[str], needed_by: str) -> dict[str, str]:
    """Return {file: digest} of data files. Raises DataError if one is missing."""
    found = {}
    for file in files:
        path = data_file(data_dir, file, needed_by)
        found[file] = content_digest(path, path.stat().st_size, path.stat().st_mtime_ns)
    return found


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


DEVICE = re.compile(r"cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?")


def check_device_name(device: str, key: str) -> None:
    """Raise UserError if `device`, which the user gave with `key`, is not the name of a device."""
    if not DEVICE.fullmatch(device):
        raise UserError(f"{key} {device}: there is no such device; give cpu, cuda, or one GPU such as cuda:1")


def check_suite(section: SuiteSection | None) -> None:
    """Raise UserError if a recipe's suite or its device name is invalid, or if the suite reads a data folder that is not given. Data
    is not read, so that a laptop can check a recipe for a cluster. The names of lm-evaluation-harness's own tasks are not checked,
    because listing them takes many seconds."""
    if section is not None:
        check_device_name(section.device, f"{KEY}.device")
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
        data_dir = Path(section.data_dir) if section.data_dir else None
        check_local_files(suite, folders, data_dir, f"{KEY}.data_dir")


def check_local_files(suite: Suite, folders: list[Path], data_dir: Path | None, key: str) -> None:
    """Raise DataError unless the data folder, which the user gave with `key`, has all files that the suite reads."""
    for file, needed_by in _local_files(suite, folders):
        data_file(data_dir, file, needed_by, key)


def tasks_without_files(suite: Suite, folders: Sequence[Path]) -> list[str]:
    """Return the tasks of a suite that read data from elsewhere than the data folder, such as from the hub."""
    local = local_tasks(folders)
    return [
        task.task
        for task in suite.tasks
        if (found := local.get(task.task)) is None or found.elsewhere or not found.files
    ]


def _local_files(suite: Suite, folders: list[Path]) -> list[tuple[str, str]]:
    """Return pairs (file relative to the data folder, task or text that reads it)."""
    local = local_tasks(folders)
    found = [
        (file, f"task {task.task}") for task in suite.tasks if task.task in local for file in local[task.task].files
    ]
    return found + [(text.file, f"text {text.name}") for text in suite.texts]
