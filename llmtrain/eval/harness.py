"""Evaluation of tasks with lm-evaluation-harness, through its public Python interface."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtrain.errors import DataError, ModelError, SuiteError, first_line, one_line
from llmtrain.eval.scores import ACCURACIES, Entry, bits_per_byte, chance_of, have_one_chance_level
from llmtrain.recipe_messages import closest
from llmtrain.suites import TaskSection, harness_version

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

ANSWER_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""lm-eval's names for the maximum number of tokens of a generated answer, in order of precedence."""
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
    """Load the model as lm-eval's command line does with `--model hf --model_args pretrained=FOLDER`, and with `max_length` if
    it has learned positions that training has not reached.

    Raises ModelError if transformers can't load it, or if the folder lacks some of its weights.
    """
    with quiet():
        import torch
        from lm_eval.models.huggingface import HFLM

        from llmtrain.eval.texts import check_weights
        from llmtrain.export.folder import recorded
        from llmtrain.export.parity import without_progress_bars

        longest = None if (known := recorded(folder)) is None else known.trained_positions
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            model = HFLM(pretrained=str(folder), batch_size=batch_size, device=device, max_length=longest)
            # lm-eval ignores transformers' report on the weights. A second load, without data, reports again. Quantized weights are
            # not checked, because their libraries may need a GPU.
            if getattr(model.model.config, "quantization_config", None) is None:
                with without_progress_bars():
                    load = type(model.model).from_pretrained
                    check_weights(folder, load(folder, device_map="meta", output_loading_info=True)[1])
        except (torch.OutOfMemoryError, ModelError):
            raise
        except Exception as error:  # transformers, safetensors and tokenizers raise many kinds of errors for damage
            raise ModelError(
                f"{folder} can't be loaded by transformers ({first_line(error)}); export the model again"
            ) from error
    if not sys.stderr.isatty():  # lm-eval's own progress bars ignore TQDM_DISABLE, and would fill a log
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(model, name, partial(getattr(model, name), disable_tqdm=True))
    return model


def check_tasks(names: Sequence[str], local: Sequence[str], folders: tuple[Path, ...], data_dir: Path | None) -> None:
    """Raise SuiteError unless each of `names` is a task of lm-eval or one of the `local` tasks.

    Raises UserError if lm-eval is not installed.
    """
    harness_version()
    if set(names) <= set(local):
        return  # listing lm-eval's own thousands of tasks takes many seconds
    print(
        "reading the list of lm-evaluation-harness's tasks, which takes a minute or more", file=sys.stderr, flush=True
    )
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


def load_task(name: str, manager: TaskManager, is_local: bool) -> dict[str, Any]:
    """Return the tasks and groups called `name`, with their data, which comes from the hub unless the task `is_local`. Raises
    DataError if the data is not available or damaged."""
    from datasets.exceptions import DatasetsError
    from jinja2 import UndefinedError

    try:
        return manager.load([name])
    except (OSError, ValueError, LookupError, RuntimeError, DatasetsError, UndefinedError) as error:
        if is_local and not isinstance(error, OSError):  # errors of JSON, text encodings, columns and empty files
            raise DataError(f"task {name}: its data can't be read ({first_line(error)}); fix the file") from error
        raise DataError(  # ValueError if another configuration of the dataset is in the hub's cache
            f"task {name}: its data is not available ({one_line(error)}); without internet, use --suite offline with --data-dir"
        ) from error


def run_task(
    section: TaskSection, limit: int | None, load: Callable[[], HFLM], manager: TaskManager, is_local: bool = False
) -> Entry | None:
    """Evaluate one task, group or tag; return None on all but the main process. `is_local` tells whether it reads local files.

    Raises DataError if the task's data is not available or damaged, SuiteError if the task does not accept the given
    few_shot, and ModelError if an answer is longer than the model's context or has no loss.
    """
    with quiet():
        from lm_eval import simple_evaluate

        loaded = load_task(section.task, manager, is_local)
        fixed = next((name for name, task in loaded["tasks"].items() if task.get_config("num_fewshot") == 0), None)
        if section.few_shot and fixed:
            raise SuiteError(
                f"task {section.task}: few_shot is {section.few_shot}, but {fixed} always takes 0; leave few_shot out"
            )
        tasks = loaded["tasks"].items() if section.few_shot else ()
        if bare := next((name for name, task in tasks if not _has_examples(task)), None):
            raise SuiteError(
                f"task {section.task}: few_shot is {section.few_shot}, but {bare} has no split for examples, which would be taken from "
                "the evaluated documents; leave few_shot out"
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
        except OverflowError:  # of math.exp, for a perplexity
            raise ModelError(
                f"task {section.task}: the model's losses are too large for a perplexity; evaluate another checkpoint"
            ) from None
        except AssertionError:
            check_answers_fit(loaded["tasks"], model)
            raise
    if results is None:
        return None
    if not all(map(_is_finite, itertools.chain.from_iterable(results["samples"].values()))):
        raise ModelError(f"task {section.task}: the model's losses are not finite; evaluate another checkpoint")
    return entry_of(results)


def _has_examples(task: Task) -> bool:
    """Return whether a task has documents for few-shot examples that are not evaluated."""
    own = task.get_config("fewshot_split") or (task.get_config("fewshot_config") or {}).get("samples")
    return bool(own or task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs()))


def _is_finite(sample: Mapping[str, Any]) -> bool:
    """Return whether all log-likelihoods of a document are finite. Each answer has one, with a flag; a text has one; a generated text
    has none."""
    values = (one[0] if isinstance(one, tuple | list) and len(one) == 2 else one for one in sample["filtered_resps"])
    return all(math.isfinite(value) for value in values if isinstance(value, float))


def check_answers_fit(tasks: Mapping[str, Task], model: HFLM) -> None:
    """Raise ModelError if a task has an answer longer than the model's context, or asks for one that would fill it.

    lm-eval only asserts that every answer fits. If a question does not fit, lm-eval drops its beginning.
    """
    advice = "leave the task out in a suite of your own, or train a model with more positions on longer sequences"
    for name, task in tasks.items():
        continuations = {instance.args[1] for instance in task.instances if instance.request_type == "loglikelihood"}
        longest = max((len(model.tok_encode(answer)) for answer in continuations), default=0)
        if longest > model.max_length:
            raise ModelError(
                f"task {name}: an answer has {longest} tokens and the model sees {model.max_length} at once, so it can't be "
                f"scored; {advice}"
            )
        generations = (instance.args[1] for instance in task.instances if instance.request_type == "generate_until")
        given = ([keys[key] for key in ANSWER_TOKENS if keys.get(key) is not None] for keys in generations)
        asked = max((int([*one, model.max_gen_toks][0]) for one in given), default=0)
        if asked >= model.max_length:
            raise ModelError(
                f"task {name}: answers may have {asked} tokens and the model sees {model.max_length} at once, so no question has "
                f"room; {advice}"
            )


def entry_of(results: Mapping[str, Any]) -> Entry:
    """Convert the results of lm-eval to an `Entry`.

    lm-eval's numbers are kept unchanged; bits per byte and chance levels are added.
    """
    samples, groups = results["samples"], results.get("groups", {})
    below = {child for group in groups for child in results["group_subtasks"].get(group, ())}
    of_groups = {leaf for group in groups for leaf in _leaves(group, results)}
    entry = Entry(shown=[name for name in (*groups, *samples) if name not in below | of_groups])
    entry.answers = {task: per_document(of_task) for task, of_task in samples.items()}
    for name, metrics in results["results"].items():
        members = [name] if name in samples else [task for task in samples if task in _leaves(name, results)]
        scores = _scores(metrics) | {"n": len({(task, doc) for task in members for doc in entry.answers[task]["doc"]})}
        if "bits_per_byte" not in scores and all("nll" in entry.answers[task] for task in members):
            nll, sizes = ([x for task in members for x in entry.answers[task][column]] for column in ("nll", "bytes"))
            scores["bits_per_byte"], scores["bits_per_byte_stderr"] = bits_per_byte(nll, sizes)
        about = {"version": results["versions"].get(name), "few_shot": results["n-shot"].get(name), "members": members}
        if set(scores) & set(ACCURACIES) and all(_is_multiple_choice(results, task) for task in members):
            tasks = [choices_and_gold(samples[task]) for task in members]
            if have_one_chance_level(tasks):  # otherwise it depends on how the group weights its tasks
                about["chance"] = chance_of(tasks)
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
    """Return {metric: value}, with lm-eval's `acc,none` shortened to `acc`; other filters keep their names. The standard error of
    a metric has its name and `_stderr`.

    A value that is not a finite number, such as an unknown standard error, becomes None, because JSON can't hold it.
    """
    scores: dict[str, float | None] = {}
    for key, value in metrics.items():
        metric, comma, variant = key.partition(",")
        if comma:
            error = "_stderr" if metric.endswith("_stderr") else ""
            name = metric if variant == "none" else f"{metric.removesuffix(error)},{variant}{error}"
            scores[name] = float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    return scores


def per_document(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the per-document results of one task as lists of equal length, in the order of documents.

    `doc` identifies the document, and each numeric metric has a list. `nll` and `bytes` are the negative
    log-likelihood in nats and the UTF-8 bytes of the right answer as lm-evaluation-harness requested it (with the
    leading space); they are absent unless every document has a single right answer. If a task has several filters,
    a document appears once per filter, and only `doc` is returned.
    """
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    kept: dict[str, list[Any]] = {"doc": [f"{s['doc_id']}:{str(s['doc_hash'])[:8]}" for s in ordered]}
    filters = {str(sample["filter"]) for sample in ordered}
    if len(filters) != 1:
        return kept
    for metric in ordered[0]["metrics"]:
        values = [sample[metric] for sample in ordered]
        if all(isinstance(value, int | float | np.number) for value in values):
            kept[metric] = [float(value) for value in values]
    right = [_right_answer(sample) for sample in ordered]
    if all(right):
        kept["nll"], kept["bytes"] = (list(column) for column in zip(*right, strict=True))
    return kept


def choices_and_gold(samples: Sequence[Mapping[str, Any]]) -> tuple[list[list[str]], list[Any]]:
    """Return the compared continuations and the right answer of each multiple-choice document."""
    choices = [[argument[1] for argument in sample["arguments"]] for sample in samples]
    return choices, [sample["target"] for sample in samples]


def _right_answer(sample: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return (nll, bytes) of the right continuation, or None unless there is exactly one with a log-likelihood."""
    arguments, responses, target = sample["arguments"], sample["filtered_resps"], sample["target"]
    if any(len(argument) != 2 or not isinstance(argument[1], str) for argument in arguments):
        return None
    if len(arguments) == 1:
        index = 0
    elif isinstance(target, int) and 0 <= target < len(arguments):
        index = target
    else:
        return None
    response = responses[index]
    if not (isinstance(response, tuple | list) and len(response) == 2):
        return None
    return -float(response[0]), len(arguments[index][1].encode())
