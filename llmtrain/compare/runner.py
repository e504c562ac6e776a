"""All trials of a comparison, one after another under their conditions; what is there already is not made again."""

from __future__ import annotations

import shlex
import signal
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from llmtrain.compare.cluster import Host, HostLimits, loopback_cluster, virtual_cluster, why_no_cluster
from llmtrain.compare.comparison import Comparison, ConditionSection, HostSection, TrialSpec, load_comparison, trials
from llmtrain.compare.progress import ComparisonProgress
from llmtrain.compare.report import write_report
from llmtrain.compare.results import load_trials
from llmtrain.compare.trial import TrialRecord, record_of, run_trial
from llmtrain.config import Recipe
from llmtrain.errors import DONE, FAILED, STOPPED_EARLY, RecipeError, UserError
from llmtrain.launch.nodes import DEFAULT_PORT
from llmtrain.recipe_check import check, check_vocabulary
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.train.run import prepare_for
from llmtrain.train.run_dir import lock_folder


def run_comparison(file: Path, overrides: Sequence[str] = (), shaping: bool = True, retry: bool = False) -> int:
    """Make all trials of a comparison file that are not there yet, and its report after each. Returns the exit code: 0,
    1 if a trial failed, 3 if it was interrupted. `overrides` are for all runs. `shaping=False`: on loopback, without the
    conditions' limits. `retry`: failed trials are made again.

    Raises UserError before the first trial for a file, recipe or machine with which it can't be done.
    """
    comparison = load_comparison(file, overrides)
    if shaping and (why := why_no_cluster()):
        raise RecipeError(f"hosts can't be made here: {why}; or compare on loopback, without limits: --no-shaping")
    planned = trials(comparison, file)
    recipes = [_checked(one, comparison) for one in planned]
    folder = Path(comparison.out_dir) / comparison.name
    lock = lock_folder(folder, "give the other comparison another `name:`")
    _open(folder, comparison)
    flags = [] if shaping else ["--no-shaping"]
    command = shlex.join(["python", "-m", "llmtrain", "compare", str(file), *overrides, *flags])
    progress = ComparisonProgress(len(planned))
    records: list[TrialRecord] = []
    try:
        with _interruptions() as raise_again:
            for recipe in recipes:  # all data first: its preparation is no part of a trial
                check_vocabulary(recipe, prepare_for(recipe, show_progress=True).vocab_size)
            for (
                condition
            ) in comparison.conditions.values():  # limits that can't be had are refused before the first trial
                with _cluster(comparison, condition, shaping):
                    pass
            for number, (one, recipe) in enumerate(zip(planned, recipes, strict=True)):
                raise_again()
                if _is_over(one, retry):
                    progress.skip(one)
                    continue
                progress.begin(number, one, recipe.train.total_steps)
                records.append(_make(one, comparison, recipe, shaping, progress))
                records[-1].write(one.directory)
                progress.end(records[-1], _seconds_left(planned[number + 1 :], records))
                _report(folder, comparison, planned, command)
    except KeyboardInterrupt:
        progress.note("interrupted; start the same command again to continue with this trial")
        return STOPPED_EARLY
    finally:
        progress.close()
        lock.release()
    progress.note(f"report: {_report(folder, comparison, planned, command)}")
    failed = [one for one in planned if (record := record_of(one.directory)) and record["state"] == "failed"]
    return FAILED if failed else DONE


def _checked(planned: TrialSpec, comparison: Comparison) -> Recipe:
    """The recipe of a trial. Raises UserError, naming the run, for one that can't be trained."""
    try:
        for stage in planned.stages:
            recipe = load_recipe(planned.recipe, (*planned.overrides, *stage.overrides))
            check(recipe, stage.replicas * comparison.hosts.processes)
        recipe = load_recipe(planned.recipe, planned.overrides)
    except UserError as error:
        raise type(error)(f"runs.{planned.run}: {error}") from None
    return recipe


def _open(folder: Path, comparison: Comparison) -> None:
    """Make the comparison's directory, or see that it belongs to this comparison."""
    path, text = folder / "comparison.yaml", resolved_yaml(comparison)
    if path.exists() and path.read_text() != text:
        here, there = text.splitlines(), path.read_text().splitlines()
        differing = next((line.strip() for line in here if line not in there), "a key is gone")
        raise RecipeError(
            f"{folder} was made by another version of this comparison ({differing}); give another `name:`, or remove the folder"
        )
    path.write_text(text)


def _is_over(planned: TrialSpec, retry: bool) -> bool:
    record = record_of(planned.directory)
    return record is not None and not (retry and record["state"] == "failed")


def _make(
    planned: TrialSpec, comparison: Comparison, recipe: Recipe, shaping: bool, progress: ComparisonProgress
) -> TrialRecord:
    condition = comparison.conditions[planned.condition]
    with _cluster(comparison, condition, shaping) as hosts:
        port = DEFAULT_PORT if shaping else _free_port()
        words = condition.words() if shaping else "on loopback, without limits"
        return run_trial(planned, comparison, recipe, hosts, port, words, progress.advance)


def _cluster(comparison: Comparison, condition: ConditionSection, shaping: bool) -> AbstractContextManager[list[Host]]:
    count = comparison.hosts.count
    if not shaping:
        return loopback_cluster(count)
    return virtual_cluster([_limits(comparison, condition, number) for number in range(count)])


def _limits(comparison: Comparison, condition: ConditionSection, number: int) -> HostLimits:
    own = condition.hosts.get(number, HostSection())
    return HostLimits(
        bandwidth_mbit=own.bandwidth_mbit or condition.bandwidth_mbit,
        latency_ms=own.latency_ms or condition.latency_ms,
        cpus=own.cpus or comparison.hosts.cpus,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _seconds_left(planned: Sequence[TrialSpec], records: Sequence[TrialRecord]) -> float:
    """An estimate: a trial takes what the same run took under the same condition, else the median of all so far."""
    median = statistics.median(record.wall_seconds for record in records)
    known = {(record.condition, record.run): record.wall_seconds for record in records}
    return sum(known.get((one.condition, one.run), median) for one in planned if record_of(one.directory) is None)


def _report(folder: Path, comparison: Comparison, planned: Sequence[TrialSpec], command: str) -> Path:
    present = [one.directory for one in planned if record_of(one.directory)]
    names = [(one.condition, one.run, one.seed) for one in planned]
    return write_report(
        load_trials(present), folder, comparison.baseline, comparison.target.loss, planned=names, command=command
    )


@contextmanager
def _interruptions() -> Iterator[Callable[[], None]]:
    """SIGTERM is a Ctrl-C too: hosts are removed on the way out. Yields a function that raises KeyboardInterrupt again if
    there was one, because Python drops it where a destructor or a callback of its imports is running."""
    requested = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
        raise KeyboardInterrupt

    def raise_again() -> None:
        if requested:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield raise_again
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
