"""Evaluation units of a suite, which are run and cached one at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.eval import texts
from llmtrain.eval.harness import check_tasks, load_model, run_task, task_manager
from llmtrain.eval.scores import Entry, Key
from llmtrain.suites import (
    SamplesSection,
    Suite,
    TaskSection,
    TextSection,
    data_file,
    digests_of_data,
    harness_version,
)
from llmtrain.task_files import digest_of, local_tasks

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

ENTRY = 2
"""Version of a task's stored results. Increase it when chance levels or other additions to lm-eval's results change."""
BATCH_OF_TEXTS = 16
"""Sequences per batch on text files if the suite's batch size is auto."""


@dataclass(frozen=True)
class Options:
    """Evaluation options: the suite and the settings of the command line."""

    suite: Suite
    task_folders: tuple[Path, ...]
    data_dir: Path | None
    limit: int | None
    batch_size: int | str
    device: str | None

    def limited(self, of_section: int | None) -> int | None:
        """Return the smaller of the suite's and the command line's limit, or None if neither is set."""
        given = [limit for limit in (of_section, self.limit) if limit is not None]
        return min(given) if given else None


class LazyModels:
    """Model of one checkpoint, loaded on first use."""

    def __init__(self, folder: Path, options: Options):
        self.folder, self.options = folder, options

    @cached_property
    def for_harness(self) -> HFLM:
        return load_model(self.folder, self.options.batch_size, self.options.device)

    @cached_property
    def for_texts(self) -> texts.Loaded:
        return texts.load_model_and_tokenizer(self.folder, self.options.device)

    def release(self) -> None:
        """Free the memory before the next checkpoint is loaded."""
        for name in ("for_harness", "for_texts"):
            self.__dict__.pop(name, None)
        gc.collect()


@dataclass(frozen=True)
class EvalUnit:
    """Evaluation unit: one task, one text file, or all prompts of a suite."""

    name: str
    key: Key
    show: tuple[str, ...]
    run: Callable[[LazyModels], Entry | None]
    """Function that evaluates the unit. It returns None on all but the main process."""
    by_all: bool = False
    """True if all processes of a launcher share the work, False if only the main process works."""


def units_of(options: Options) -> list[EvalUnit]:
    """Return the evaluation units of a suite.

    Raises UserError, before any model is loaded, for an unknown task or missing local data.
    """
    suite = options.suite
    local = local_tasks(options.task_folders)
    found = []
    if suite.tasks:
        names = [section.task for section in suite.tasks]
        names += [member for name in names if name in local for member in local[name].elsewhere]
        complete = [name for name, task in local.items() if task.is_complete]
        check_tasks(names, complete, options.task_folders, options.data_dir)
    for section in suite.tasks:
        task = local.get(section.task)
        of_files: Key = {}
        if task:
            data = digests_of_data(options.data_dir, task.files, f"task {task.name}")
            of_files = {"task_files": digest_of(options.task_folders), "data": data}
        found.append(_task_unit(section, options, of_files, with_defaults=not (task and task.is_complete)))
    for section in suite.texts:
        found.append(_text_unit(section, options))
    if suite.samples:
        found.append(_samples_unit(suite.samples))
    return found


def _task_unit(section: TaskSection, options: Options, of_files: Key, with_defaults: bool) -> EvalUnit:
    limit = options.limited(section.limit)
    key = {"kind": "lm_eval", "lm_eval": harness_version(), "entry": ENTRY}
    key |= {"task": section.task, "few_shot": section.few_shot}
    return EvalUnit(
        section.task,
        {**key, "limit": limit, **of_files},
        section.show,
        lambda models: run_task(
            section,
            limit,
            lambda: models.for_harness,
            task_manager(options.task_folders, options.data_dir, with_defaults),
            bool(of_files.get("data")),
        ),
        by_all=True,
    )


def _text_unit(section: TextSection, options: Options) -> EvalUnit:
    limit = options.limited(section.limit)
    path = data_file(options.data_dir, section.file, f"text {section.name}")
    how = section.model_dump(include={"separator", "every", "window"})
    key = {"kind": "text", "protocol": texts.PROTOCOL, "name": section.name, "limit": limit, **how}
    batch = options.batch_size if isinstance(options.batch_size, int) else BATCH_OF_TEXTS
    return EvalUnit(
        section.name,
        {**key, "data": digests_of_data(options.data_dir, [section.file], f"text {section.name}")},
        section.show,
        lambda models: texts.evaluate_text(section, path, limit, models.for_texts, batch),
    )


def _samples_unit(section: SamplesSection) -> EvalUnit:
    return EvalUnit(
        "samples",
        {"kind": "samples", "protocol": texts.PROTOCOL, **section.model_dump(mode="json")},
        (),
        lambda models: texts.write_samples(section, models.for_texts),
    )
