"""Results of trials: the record that a trial leaves in trial.json, and trials read back from their run directories."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from llmtrain.compare.comparison import COMPARISON, RUN_AGAIN, TRIAL
from llmtrain.errors import ResultsError, reason
from llmtrain.files import LEAVE_OUT, read_lines, read_mapping, text_for_number
from llmtrain.run_files import EVALUATIONS, METRICS, RECIPE, SUMMARY

AS_RUN = "as run"
"""Condition of runs that no comparison started, whatever cluster they ran on."""
VIRTUAL = "perf/virtual_seconds"
WAITS = {"comm/exposed_seconds", "comm/wait_seconds"}
LINE = {"step", "tokens", "seconds"}
"""Keys of every line of metrics.jsonl."""
EVALUATE_AGAIN = "delete it and evaluate again"
"""Remedy for a damaged result of `llmtrain eval`."""
MOST_OTHER_LOAD = 0.05
"""Share of the machine's CPU time that other programs may take during a trial without a warning."""
SPAN = ["kind", "step", "start", "end"]


class TrialState(StrEnum):
    """End of a trial, or the reason why it has not ended."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """It reached the time limit, or was interrupted."""
    UNFINISHED = "unfinished"
    """Its run directory was never closed: it still runs, or was killed."""
    NOT_YET_RUN = "not yet run"


STATE_OF_SUMMARY = {"done": TrialState.DONE, "signal": TrialState.STOPPED, "error": TrialState.FAILED}


class TrialRecord(BaseModel, frozen=True):
    """Content of trial.json, whose existence means that the trial has ended."""

    condition: str = AS_RUN
    run: str
    seed: int
    state: TrialState
    exit_codes: list[int | None] = []
    """Exit code of each host's torchrun; negative if a signal killed it."""
    wall_seconds: float | None = None
    recipe: str | None = None
    overrides: list[str] = []
    global_batch: int | None = None
    """Sequences per step at the start; None if an earlier version wrote the record."""
    stages: list[str] = []
    """Changes of the number of hosts within the trial, in words."""
    condition_in_words: str | None = None
    """Limits and faults of the condition."""
    commit: str | None = None
    hosts: list[dict[str, Any]] = []
    """Name and address of each host, and, except on loopback, the bytes `sent` and `received` by its network card."""
    last_lines: list[str] = []
    """Last output lines of the host that failed first."""
    missed: list[str] = []
    """Pauses and deaths of the condition that never happened, because training ended before them."""
    other_load: float | None = None
    """Share of the machine's CPU time that other programs took during the trial; None if unknown."""

    @property
    def is_disturbed(self) -> bool:
        """Return whether other programs took so much CPU time that the trial's times are in doubt. It is false for failed
        trials, where this is unknown: the processes of a killed host are no longer descendants of this process."""
        ended = self.state in (TrialState.DONE, TrialState.STOPPED)
        return ended and self.other_load is not None and self.other_load > MOST_OTHER_LOAD


class Trial(TrialRecord, frozen=True):
    """Result of one run under one condition with one seed: its record, and what it left in its run directory."""

    path: Path
    method: str | None
    """Synchronization method; None if the run failed before it wrote its recipe."""
    averages_every_step: bool
    """True for synchronous data parallelism, the default baseline."""
    has_no_times: bool = False
    """True if its replicas took turns in one process without a virtual clock, so that its seconds are not those of a cluster."""
    benchmarks: dict[str, dict[str, Any]] = {}
    """Results of `llmtrain eval` for the last checkpoint, by suite."""
    lines: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl; null stands for a value that was not finite."""
    summary: dict[str, Any]

    @property
    def is_measured(self) -> bool:
        """Return whether the trial's rates and losses count. Those of failed trials do not."""
        return self.state in (TrialState.DONE, TrialState.STOPPED) and bool(self.lines)

    def last(self, tag: str) -> dict[str, Any]:
        """Return the last line of metrics that has a value for `tag`, or an empty dict if there is none."""
        return next((line for line in reversed(self.lines) if line.get(tag) is not None), {})

    @cached_property
    def spans(self) -> pd.DataFrame:
        """Return the trace spans of all ranks in order of time: rank, kind, step, start and end (Unix seconds)."""
        files = {int(path.stem.removeprefix("rank-")): path for path in (self.path / "trace").glob("rank-*.jsonl")}
        spans = [{**span, "rank": rank} for rank, path in files.items() for span in read_lines(path)]
        return pd.DataFrame(spans, columns=["rank", *SPAN]).dropna().sort_values(["rank", "start"], ignore_index=True)


def load_trials(directories: Sequence[Path]) -> list[Trial]:
    """Return every trial in or below `directories`, in order of their paths.

    A trial is a folder with trial.json, or any run directory of llmtrain (metrics.jsonl and recipe.yaml). A trial of a
    comparison that has no trial.json has not ended and is left out. Raises ResultsError if a directory contains no
    trial, or if two trials have the same condition, run and seed.
    """
    found: dict[Path, Trial] = {}
    for directory in directories:
        if not (paths := list(_run_directories(Path(directory)))):
            raise ResultsError(
                f"{directory} contains no finished run (trial.json, or metrics.jsonl and recipe.yaml); "
                "give the folder of a comparison (runs/NAME) or of a run"
            )
        found.update({path.resolve(): _load(path) for path in paths})
    seen: dict[tuple[str, str, int], Trial] = {}
    for trial in found.values():
        other = seen.setdefault((trial.condition, trial.run, trial.seed), trial)
        if other is not trial:
            raise ResultsError(
                f"{other.path} and {trial.path} are both run {trial.run!r} with seed {trial.seed} under {trial.condition!r}; "
                "rename one folder, or leave one out"
            )
    return list(found.values())


def _run_directories(top: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(top):
        path, is_run = Path(folder), {METRICS, RECIPE} <= set(files)
        of_a_comparison = any((parent / COMPARISON).exists() for parent in path.resolve().parents[2:3])
        if TRIAL in files or (is_run and not of_a_comparison):
            yield path
        below[:] = [] if is_run or TRIAL in files else sorted(below)


def _load(path: Path) -> Trial:
    # a folder without trial.json is a run that no comparison can make again
    remedy = RUN_AGAIN if (path / TRIAL).exists() else LEAVE_OUT
    # no Recipe, because another version may have written it
    record, summary, recipe = (read_mapping(path / name, remedy) for name in (TRIAL, SUMMARY, RECIPE))
    try:
        if wrong := text_for_number(summary):
            raise ValueError(f"summary.json has {wrong}")
        sync, run, parallel = (recipe.get(section) or {} for section in ("sync", "run", "parallel"))
        takes_turns, has_clock = bool(parallel.get("in_process")), parallel.get("virtual_clock") is not None
        found = {
            "run": path.resolve().name,
            "seed": run.get("seed", 0),
            "state": STATE_OF_SUMMARY.get(str(summary.get("stopped")), TrialState.UNFINISHED),
            "method": sync.get("method"),
            "averages_every_step": (sync.get("period") or {}).get("kind") == "every_step",
            "has_no_times": takes_turns and not has_clock,
        }
        lines = [line for line in read_lines(path / METRICS) if line.keys() >= LINE]
        lines = _by_virtual_clock(lines) if takes_turns and has_clock else lines
        return Trial.model_validate(
            found
            | record
            | {
                "path": path,
                "summary": summary,
                "lines": lines,
                "benchmarks": benchmarks_of(path, summary.get("steps")),
            }
        )
    except (AttributeError, TypeError, ValueError) as error:
        why = str(error).partition(" [type=")[0] if isinstance(error, ValueError) else reason(error)
        raise ResultsError(f"{path} is not a valid trial ({' '.join(why.split())}); {remedy}") from error


def _by_virtual_clock(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with the seconds of the run's virtual clock, interpolated over steps for lines that have none. Leave out WAITS,
    which are real seconds of the process."""
    known = {0: 0.0} | {line["step"]: line[VIRTUAL] for line in lines if line.get(VIRTUAL) is not None}
    return [
        {key: value for key, value in line.items() if key not in WAITS}
        | {"seconds": float(np.interp(line["step"], [*known], [*known.values()]))}
        for line in lines
    ]


def benchmarks_of(directory: Path, steps: int | None) -> dict[str, dict[str, Any]]:
    """Return the results of the checkpoint at the end of a run of `steps` steps, by suite. An evaluation of the newest
    checkpoint (SUITE.json) takes precedence over an evaluation of a chosen step."""
    paths = sorted((directory / EVALUATIONS).glob("*.json"))  # SUITE-step-N.json before SUITE.json
    found = {path: read_mapping(path, EVALUATE_AGAIN) for path in paths}
    return {
        str(result["suite"]): result
        for path, result in found.items()
        if {"suite", "results", "tasks", "shown"} <= result.keys()
        and (result["checkpoint_step"] == steps if "checkpoint_step" in result else "-step-" not in path.stem)
    }
