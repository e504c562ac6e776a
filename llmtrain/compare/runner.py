"""Execution of a comparison's trials, one after another under their conditions. Ended trials are not repeated."""

from __future__ import annotations

import math
import shlex
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llmtrain.compare.benchmarks import check_benchmarks, evaluate_trials, fetch_tasks
from llmtrain.compare.cluster.hosts import Host, loopback_cluster, virtual_cluster, why_no_cluster
from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.compare.comparison import (
    COMPARISON,
    WITHOUT_LIMITS,
    Comparison,
    ConditionSection,
    TrialSpec,
    check_overrides,
    load_comparison,
    trials,
)
from llmtrain.compare.measures import Results, gather
from llmtrain.compare.report import percent, seconds, write_report
from llmtrain.compare.results import TrialRecord, TrialState, load_trials
from llmtrain.compare.trial import TrialRun
from llmtrain.config import Recipe
from llmtrain.errors import DONE, FAILED, STOPPED_EARLY, RecipeError, UserError, one_line
from llmtrain.launch.nodes import DEFAULT_PORT
from llmtrain.machine_check import check_machine
from llmtrain.parallel.network import unused_port
from llmtrain.plan.recipe_warnings import recipe_warnings
from llmtrain.process_limits import usable_cores
from llmtrain.recipe_check import check, check_vocabulary
from llmtrain.recipe_diff import differences
from llmtrain.recipe_loader import COMMAND_LINE, load_recipe, load_yaml, resolved_yaml
from llmtrain.run_files import RECIPE
from llmtrain.run_list import is_number
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run_dir import lock_folder
from llmtrain.train.run_length import batch_problem
from llmtrain.train.signals import handled

AFTER_TRIALS = ("seeds", "baseline", "target", "suite")
"""Keys of a comparison that change none of its existing trials: another seed adds trials, and the other keys concern results."""


def run_comparison(file: Path, overrides: Sequence[str] = (), shaping: bool = True, retry: bool = False) -> int:
    """Run all trials of a comparison file that have not ended yet, and write the report after each. Then evaluate the trials,
    if the file names a suite.

    Returns the exit code: 0, 1 if a trial or an evaluation failed, 3 after an interruption. `overrides` apply to all runs.
    With `shaping=False`, hosts are on loopback, without the conditions' limits. With `retry`, failed trials are repeated.
    Raises UserError before the first trial if the file, a recipe or the machine does not allow it.
    """
    comparison = load_comparison(file, overrides)
    if shaping and (why := why_no_cluster()):
        raise RecipeError(
            f"virtual hosts can't be created here: {why}; or compare on loopback, without limits: --no-shaping"
        )
    check_benchmarks(comparison.suite)
    planned = trials(comparison, file)
    recipes = [_checked(one, comparison) for one in planned]
    folder = Path(comparison.out_dir) / comparison.name
    with _writing(folder):
        lock = lock_folder(folder, "give the other comparison another `name:`")
    repeated = (None, TrialState.FAILED) if retry else (None,)
    missing = [pair for pair in zip(planned, recipes, strict=True) if pair[0].state() in repeated]
    _check_folder(folder, comparison)
    for one, recipe in zip(planned, recipes, strict=True):
        if one.state() not in repeated and (changed := _differences(one, recipe, comparison, shaping)):
            raise _of_another_version(folder, f"{one.condition} · {one.run} · seed {one.seed}: {changed[0]}")
    with _writing(folder):
        (folder / COMPARISON).write_text(resolved_yaml(comparison), encoding="utf-8")
    flags = [] if shaping else ["--no-shaping"]
    command = shlex.join(["llmtrain", "compare", str(file), *overrides, *flags])
    progress = ComparisonProgress(len(planned), len(missing))
    try:
        with progress, _interruptions() as signals:
            for run, recipe in {one.run: recipe for one, recipe in zip(planned, recipes, strict=True)}.items():
                for line in recipe_warnings(recipe):
                    progress.print(f"warning: runs.{run}: {line}")
            for line in _crowding(comparison) if shaping else ():
                progress.print(f"warning: {line}")
            # All data first, because preparing it is not part of a trial.
            for one, recipe in zip(planned, recipes, strict=True):
                first, *_ = prepare_texts(_with_largest_batch(one), show_progress=True).values()
                check_vocabulary(recipe, first.vocab_size)
            for condition in comparison.conditions.values():  # refuse a limit before the first trial
                with _cluster(comparison, condition, shaping):
                    pass
            if missing:
                fetch_tasks(comparison.suite, folder, progress.print)
            for number, (one, recipe) in enumerate(missing, 1):
                if signals:  # a signal has arrived, but Python has dropped its exception
                    raise KeyboardInterrupt
                progress.begin(one, recipe.train.total_steps)
                record = _make(one, comparison, recipe, shaping, progress)
                progress.end(record, _seconds_left([one for one, _ in missing[number:]], planned))
                with _writing(folder):
                    write_report(_results(comparison, planned), folder, command)
            succeeded = comparison.suite is None or evaluate_trials(
                planned, _results(comparison, planned).baseline, comparison.suite, progress.print
            )
    except KeyboardInterrupt:
        progress.print("interrupted; start the same command again to continue with this trial")
        return STOPPED_EARLY
    finally:
        lock.release()
    with _writing(folder):
        progress.print(f"report: {write_report(_results(comparison, planned), folder, command)}")
    return DONE if succeeded and TrialState.FAILED not in map(TrialSpec.state, planned) else FAILED


def _checked(planned: TrialSpec, comparison: Comparison) -> Recipe:
    """Return the recipe of a trial. Raises UserError, which names the run, if it can't be trained."""
    try:
        check_overrides(planned, comparison)
        earlier: Recipe | None = None
        for stage in planned.stages:
            recipe = load_recipe(planned.recipe, planned.overrides_of(stage))
            check(recipe, stage.replicas * comparison.hosts.processes)
            check_machine(recipe)
            if earlier is not None and (problem := batch_problem(earlier, recipe)):
                raise RecipeError(
                    f"the restart with train.global_batch={recipe.train.global_batch} is not possible; {problem}"
                )
            earlier = recipe
        recipe, garbage = (
            load_recipe(planned.recipe, planned.overrides),
            comparison.conditions[planned.condition].garbage,
        )
        if garbage is not None and garbage.first > recipe.train.total_steps:
            raise RecipeError(
                f"conditions.{planned.condition}.garbage begins in step {garbage.first}, but the run has "
                f"{recipe.train.total_steps} steps; give an earlier step, or train more"
            )
        return recipe
    except UserError as error:
        message = str(error).removeprefix(f"{COMMAND_LINE}: ")  # most overrides come from the file
        raise type(error)(f"runs.{planned.run}: {message}") from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into a RecipeError that names the key of the folder."""
    try:
        yield
    except OSError as error:
        raise RecipeError(f"out_dir: {folder} can't be written ({one_line(error)}); give another folder") from error


def _with_largest_batch(planned: TrialSpec) -> Recipe:
    """Return the recipe of the trial's stage that reads the most text per step."""
    recipes = (load_recipe(planned.recipe, planned.overrides_of(stage)) for stage in planned.stages)
    return max(recipes, key=lambda recipe: recipe.train.global_batch)


def _check_folder(folder: Path, comparison: Comparison) -> None:
    """Raise RecipeError if the folder belongs to a comparison with other trials."""
    path = folder / COMPARISON
    if not path.exists():
        return
    data = load_yaml(path, "comparison", str), comparison.model_dump(mode="json")
    there, here = (_lines_about_trials(one) for one in data)
    if there != here:
        pairs = ((there, here, "there"), (here, there, "here"))
        found = [
            f"{lacking[0].lstrip(' -')} {where}"
            for one, other, where in pairs
            if (lacking := [line for line in one if line not in other])
        ]
        raise _of_another_version(folder, ", ".join(found) or "in another order")


def _lines_about_trials(data: Any) -> list[str]:
    """Return the lines of a comparison file without the keys that change no trial."""
    kept = {key: value for key, value in data.items() if key not in AFTER_TRIALS} if isinstance(data, dict) else data
    lines = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=math.inf).splitlines()
    # In files of earlier versions, restarts have no such key.
    return [line for line in lines if line.strip() != "global_batch: null"]


def _differences(planned: TrialSpec, recipe: Recipe, comparison: Comparison, shaping: bool) -> list[str]:
    """Return a line for each difference between an ended trial as it was made and as it would be made now. The number of replicas
    is not compared. A batch that changes within the trial is compared with the record's, because the stored recipe has the values of
    the last stage."""
    record = planned.record()
    there = record.get("condition_in_words")
    here, stored = _words(planned, comparison, shaping), planned.directory / RECIPE
    same = (
        (None, here) if shaping else (None, here, WITHOUT_LIMITS)
    )  # earlier versions did not name faults without shaping
    changed = [] if there in same else [f"{there} there, {here} here"]
    batches = ["train.global_batch"] if any(stage.global_batch for stage in planned.stages) else []
    ignored = ["parallel.replicas", *batches]
    # In records of earlier versions, there is no batch.
    if batches and (batch := record.get("global_batch")) not in (None, recipe.train.global_batch):
        changed.append(f"train.global_batch: {batch} there, {recipe.train.global_batch} here")
    try:
        return [*changed, *(differences(load_recipe(stored), recipe, ignored) if stored.exists() else [])]
    except RecipeError as error:  # another version with other keys wrote it
        return [*changed, str(error)]


def _of_another_version(folder: Path, differing: str) -> RecipeError:
    return RecipeError(
        f"{folder} belongs to another version of this comparison ({differing}); give another `name:`, or remove the folder"
    )


def _make(
    planned: TrialSpec, comparison: Comparison, recipe: Recipe, shaping: bool, progress: ComparisonProgress
) -> TrialRecord:
    words = _words(planned, comparison, shaping)
    with _cluster(comparison, comparison.conditions[planned.condition], shaping, planned.seed) as hosts:
        port = DEFAULT_PORT if shaping else unused_port()
        return TrialRun(planned, comparison, recipe, hosts, port, words, progress.show_step).run()


def _words(planned: TrialSpec, comparison: Comparison, shaping: bool) -> str:
    return comparison.conditions[planned.condition].settings(shaping)


def _cluster(
    comparison: Comparison, condition: ConditionSection, shaping: bool, seed: int = 0
) -> AbstractContextManager[list[Host]]:
    if not shaping:
        return loopback_cluster(comparison.hosts.count)
    return virtual_cluster(_limits(comparison, condition), seed=seed)


def _limits(comparison: Comparison, condition: ConditionSection) -> list[HostLimits]:
    limits = condition.model_dump(include={"bandwidth_mbit", "latency_ms", "loss"}) | {"cpus": comparison.hosts.cpus}
    own = [condition.hosts.get(number, HostLimits()) for number in range(comparison.hosts.count)]
    return [HostLimits(**limits | host.model_dump(exclude_none=True)) for host in own]


def _crowding(comparison: Comparison) -> Iterator[str]:
    """Yield a warning for each condition whose hosts together may use more cores than the machine has. A host without a
    limit is assumed to use one core per rank."""
    cores = usable_cores()
    for name, condition in comparison.conditions.items():
        cpus = sum(one.cpus or comparison.hosts.processes for one in _limits(comparison, condition))
        if cpus > cores:
            yield (
                f"conditions.{name}: the hosts use up to {cpus:g} cores together, and this machine has {cores}, so hosts that wait make "
                f"the others faster; give hosts.cpus={cores / comparison.hosts.count:.2g} or less"
            )


def _seconds_left(missing: Sequence[TrialSpec], planned: Sequence[TrialSpec]) -> float:
    """Estimate the seconds that the missing trials will take. A trial takes as long as an ended one of the same run under the
    same condition or, if there is none, as the median of all ended trials of the comparison. Failed trials do not count,
    because they say nothing about the duration of a complete one. Return 0 if all ended trials have failed."""
    known: dict[tuple[str, str], float] = {}
    for one in planned:
        record = one.record()
        if record.get("state") in (TrialState.DONE, TrialState.STOPPED) and is_number(record.get("wall_seconds")):
            known[one.condition, one.run] = record["wall_seconds"]
    if not known:
        return 0.0
    median = statistics.median(known.values())
    return sum(known.get((one.condition, one.run), median) for one in missing)


def _results(comparison: Comparison, planned: Sequence[TrialSpec]) -> Results:
    present = [one.directory for one in planned if one.state()]
    names = [(one.condition, one.run, one.seed) for one in planned]
    return gather(load_trials(present), comparison.baseline, comparison.target.loss, names)


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP as on Ctrl-C, so that hosts are removed on exit.

    Yields a list of the signals that have arrived, because Python drops a KeyboardInterrupt that is raised in a
    destructor or in a callback of its imports.
    """
    signals: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), interrupt):
        yield signals


class ComparisonProgress(Progress):
    """Progress display: on a terminal, a bar for all trials and one for the current trial; elsewhere, plain lines."""

    def __init__(self, total: int, missing: int):
        console = Console(file=sys.stdout, markup=False, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._all = self.add_task("trials", total=total, completed=total - missing)
        self._one = self.add_task("steps", total=None)

    def begin(self, planned: TrialSpec, steps: int) -> None:
        """Show the next trial as the current one."""
        self._name = f"{planned.condition} · {planned.run} · seed {planned.seed}"
        self.reset(self._one, description=self._name, total=steps)
        if self.disable:
            trials = self.tasks[self._all]
            self.print(f"trial {trials.completed + 1} of {trials.total}: {self._name}")

    def show_step(self, step: int) -> None:
        """Show that the current trial has reached a step."""
        self.update(self._one, completed=step)

    def end(self, record: TrialRecord, seconds_left: float) -> None:
        """Show how the current trial ended, and the estimated time for the remaining ones."""
        self.advance(self._all)
        left = f"; about {seconds(seconds_left)} left" if seconds_left else ""
        self.print(f"{self._name}: {record.state} in {seconds(record.wall_seconds)}{left}")
        for line in record.last_lines[-3:]:
            self.print(f"    {line}")
        for fault in record.missed:
            self.print(f"    warning: it ended before {fault}")
        if record.is_disturbed:
            self.print(f"    warning: other programs took {percent(record.other_load)} of the machine's CPU time")
