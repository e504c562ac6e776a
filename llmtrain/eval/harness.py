"""Evaluation of tasks with lm-evaluation-harness, through its public Python interface."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import DataError, ModelError, SuiteError
from llmtrain.eval.cache import Entry
from llmtrain.eval.scores import ACCURACIES, bits_per_byte, chance_of, choices_and_gold, per_document
from llmtrain.recipe_messages import closest
from llmtrain.suites.suite import TaskSection, harness_version

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

BOOTSTRAP = 1000
"""Resamples for the standard error of a perplexity; lm-eval's command line uses 100,000, which takes minutes."""


@contextmanager
def quiet() -> Iterator[None]:
    """Let lm-eval, transformers and datasets log errors only, and redirect stdout to stderr.

    stdout is reserved for results.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # else lm-eval starts a process pool for 1,000 resamples
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def load_model(folder: Path, batch_size: int | str, device: str | None) -> HFLM:
    """Load the model as lm-eval's command line does with `--model hf --model_args pretrained=FOLDER`."""
    with quiet():
        import torch
        from lm_eval.models.huggingface import HFLM

        return HFLM(
            pretrained=str(folder),
            batch_size=batch_size,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )


def check_tasks(names: Sequence[str], local: Sequence[str], folders: tuple[Path, ...], data_dir: Path | None) -> None:
    """Raise SuiteError unless each of `names` is a task of lm-eval or one of the `local` tasks.

    Raises UserError if lm-eval is not installed.
    """
    harness_version()
    if set(names) <= set(local):
        return  # listing lm-eval's own thousands of tasks takes many seconds
    known = task_manager(folders, data_dir, True).all_tasks
    unknown = next((name for name in names if name not in known), None)
    if unknown:
        near = closest(unknown, known)
        hint = f"did you mean {near}?" if near else "`lm_eval ls tasks` lists lm-evaluation-harness's"
        raise SuiteError(f"task {unknown}: neither lm-evaluation-harness nor llmtrain has it; {hint}")


@cache
def task_manager(folders: tuple[Path, ...], data_dir: Path | None, with_defaults: bool) -> TaskManager:
    """Return lm-eval's index of the tasks in `folders`, including its own tasks if `with_defaults` is set."""
    with quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager(
            include_path=list(folders),
            include_defaults=with_defaults,
            metadata={"data_dir": str(data_dir)} if data_dir else None,
        )


def run_task(section: TaskSection, limit: int | None, load: Callable[[], HFLM], manager: TaskManager) -> Entry | None:
    """Evaluate one task, group or tag; return None on all but the main process.

    Raises DataError if the task's data is not available, SuiteError if the task does not accept the given few_shot,
    and ModelError if an answer is longer than the model's context.
    """
    with quiet():
        from lm_eval import simple_evaluate

        try:
            loaded = manager.load([section.task])
        except OSError as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"task {section.task}: its data can't be had ({reason}); without internet, take --suite offline with --data-dir"
            ) from None
        fixed = next((name for name, task in loaded["tasks"].items() if task.get_config("num_fewshot") == 0), None)
        if section.few_shot and fixed:
            raise SuiteError(
                f"task {section.task}: few_shot is {section.few_shot}, but {fixed} always takes 0; leave few_shot out"
            )
        group, model = loaded["groups"].get(section.task), load()
        try:
            results = simple_evaluate(
                model=model,
                tasks=[group] if group else list(loaded["tasks"].values()),
                num_fewshot=section.few_shot,
                limit=limit,
                bootstrap_iters=BOOTSTRAP,
                task_manager=manager,
            )
        except AssertionError:
            check_answers_fit(loaded["tasks"], model)
            raise
    if results is None:
        return None
    return entry_of(results)


def check_answers_fit(tasks: Mapping[str, Task], model: HFLM) -> None:
    """Raise ModelError if a task has an answer longer than the model's context.

    lm-eval only asserts that every answer fits. If a question does not fit, lm-eval drops its beginning.
    """
    for name, task in tasks.items():
        continuations = {instance.args[1] for instance in task.instances if instance.request_type == "loglikelihood"}
        longest = max((len(model.tok_encode(answer)) for answer in continuations), default=0)
        if longest > model.max_length:
            raise ModelError(
                f"task {name}: an answer has {longest} tokens and the model sees {model.max_length} at once, so it can't be "
                "scored; leave the task out in a suite of your own, or give the model more positions when you train it"
            )


def entry_of(results: Mapping[str, Any]) -> Entry:
    """Convert the results of lm-eval to an `Entry`.

    lm-eval's numbers are kept unchanged; bits per byte and chance levels are added.
    """
    samples, groups = results["samples"], results.get("groups", {})
    below = {child for children in results["group_subtasks"].values() for child in children}
    entry = Entry(shown=[name for name in (groups or samples) if name not in below] or list(samples))
    entry.answers = {task: per_document(of_task) for task, of_task in samples.items()}
    for name, metrics in results["results"].items():
        members = [name] if name in samples else [task for task in samples if task in _leaves(name, results)]
        scores = _scores(metrics) | {"n": len({(task, doc) for task in members for doc in entry.answers[task]["doc"]})}
        if "bits_per_byte" not in scores and all("nll" in entry.answers[task] for task in members):
            nll, sizes = ([x for task in members for x in entry.answers[task][column]] for column in ("nll", "bytes"))
            scores["bits_per_byte"], scores["bits_per_byte_stderr"] = bits_per_byte(nll, sizes)
        about = {"version": results["versions"].get(name), "few_shot": results["n-shot"].get(name), "members": members}
        if set(scores) & set(ACCURACIES) and all(_is_multiple_choice(results, task) for task in members):
            levels = [chance_of(*choices_and_gold(samples[task])) for task in members]
            weights = [len(samples[task]) for task in members]
            about["chance"] = sum(a * b for a, b in zip(levels, weights, strict=True)) / sum(weights)
        entry.scores[name], entry.about[name] = scores, about
    entry.shown = [name for name in entry.shown if name in entry.scores]
    return entry


def _is_multiple_choice(results: Mapping[str, Any], task: str) -> bool:
    config = results["configs"][task]
    metrics = {metric["metric"] for metric in config.get("metric_list", [])}
    return config["output_type"] == "multiple_choice" and "acc_mutual_info" not in metrics


def _leaves(group: str, results: Mapping[str, Any]) -> set[str]:
    children = results["group_subtasks"].get(group, [])
    return set(children) | {leaf for child in children for leaf in _leaves(child, results)}


def _scores(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return {metric: value}, with lm-eval's `acc,none` shortened to `acc`; other filters keep their names.

    A value that is not a number, such as an unknown standard error, becomes None.
    """
    scores: dict[str, float | None] = {}
    for key, value in metrics.items():
        metric, comma, variant = key.partition(",")
        if comma:
            name = metric if variant == "none" else key
            scores[name] = float(value) if isinstance(value, int | float) else None
    return scores
