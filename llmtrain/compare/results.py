"""Trials read back from their run directories, including failed ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from pydantic import BaseModel

from llmtrain.errors import ResultsError

AS_RUN = "as run"
"""Condition of runs that no comparison started, whatever cluster they ran on."""
DONE, FAILED, STOPPED, UNFINISHED, NOT_YET_RUN = "done", "failed", "stopped", "unfinished", "not yet run"
"""States of a trial. Unfinished: its run directory was never closed (still running or killed). Not yet run: planned."""

STATE_OF_SUMMARY = {"done": DONE, "signal": STOPPED, "error": FAILED}
ALWAYS_THERE = {"step", "tokens", "seconds"}
SPAN = ["kind", "step", "start", "end"]


class Trial(BaseModel, frozen=True):
    """Result of one run under one condition with one seed, read from trial.json and the run directory."""

    path: Path
    condition: str = AS_RUN
    run: str
    seed: int
    state: str
    method: str | None
    """None if the run failed before it wrote its recipe."""
    averages_every_step: bool
    """True for synchronous data parallelism, the default baseline."""
    lines: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl; null stands for a value that was not finite."""
    summary: dict[str, Any]
    exit_codes: list[int | None] = []
    hosts: list[dict[str, Any]] = []
    """Bytes that each host's interface counted during the trial: `sent`, `received`; null if not read (loopback)."""
    condition_in_words: str | None = None
    recipe: str | None = None
    overrides: list[str] = []
    commit: str | None = None
    machine: str | None = None
    wall_seconds: float | None = None
    last_lines: list[str] = []

    @property
    def is_measured(self) -> bool:
        """Return whether the trial's rates and losses count. Those of failed trials do not."""
        return self.state in (DONE, STOPPED) and bool(self.lines)

    def last(self, tag: str) -> dict[str, Any]:
        """Return the last line of metrics that has a value for `tag`, or an empty dict if there is none."""
        return next((line for line in reversed(self.lines) if line.get(tag) is not None), {})

    @cached_property
    def spans(self) -> pd.DataFrame:
        """Return the trace spans of all ranks in order of time: rank, kind, step, start and end (Unix seconds)."""
        files = {int(path.stem.removeprefix("rank-")): path for path in (self.path / "trace").glob("rank-*.jsonl")}
        spans = [{**span, "rank": rank} for rank, path in files.items() for span in _json_lines(path, {*SPAN})]
        return pd.DataFrame(spans, columns=["rank", *SPAN]).sort_values(["rank", "start"], ignore_index=True)


def load_trials(directories: Sequence[Path]) -> list[Trial]:
    """Return every trial in or below `directories`, in order of their paths.

    A trial is a folder with trial.json, or any run directory of llmtrain (metrics.jsonl and recipe.yaml). A trial of a
    comparison that has no trial.json has not ended and is left out. Raises ResultsError if a directory contains no
    trial, or if two trials have the same condition, run and seed.
    """
    found: dict[Path, Trial] = {}
    for directory in directories:
        paths = list(_run_directories(Path(directory)))
        if not paths:
            raise ResultsError(
                f"{directory} holds no run that has ended: expected trial.json, or metrics.jsonl beside recipe.yaml, in it "
                "or below it; give the folder of a comparison (runs/NAME) or of a run"
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
        path, is_run = Path(folder), {"metrics.jsonl", "recipe.yaml"} <= set(files)
        of_a_comparison = any((parent / "comparison.yaml").exists() for parent in path.resolve().parents[2:3])
        if "trial.json" in files or (is_run and not of_a_comparison):
            yield path
        below[:] = [] if is_run or "trial.json" in files else sorted(below)


def _load(path: Path) -> Trial:
    record, summary = _json(path / "trial.json"), _json(path / "summary.json")
    recipe = _read(path / "recipe.yaml", yaml.safe_load)  # plain mappings, because another version may have written it
    try:
        sync, run = ((isinstance(recipe, dict) and recipe.get(section)) or {} for section in ("sync", "run"))
        found = {
            "run": path.resolve().name,
            "seed": run.get("seed", 0),
            "state": STATE_OF_SUMMARY.get(summary.get("stopped", ""), UNFINISHED),
            "method": sync.get("method"),
            "averages_every_step": (sync.get("period") or {}).get("kind") == "every_step",
        }
        files = {"path": path, "summary": summary, "lines": tuple(_json_lines(path / "metrics.jsonl", ALWAYS_THERE))}
        return Trial.model_validate(found | record | files)
    except (AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).partition(" [type=")[0].split())
        raise ResultsError(f"{path} is not what a trial leaves behind ({reason}); delete it to run it again") from error


def _json_lines(path: Path, needed: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file that have all needed keys. Skips a line that a killed writer cut off."""
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and all(value.get(name) is not None for name in needed):
            yield value


def _json(path: Path) -> dict[str, Any]:
    value = _read(path, json.loads)
    if not isinstance(value, dict | None):
        raise ResultsError(f"{path} holds no JSON object; delete its folder to run that trial again")
    return value or {}


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """Return the parsed content of a file, or None if it does not exist. Raises ResultsError if it is damaged."""
    try:
        return parse(path.read_text()) if path.exists() else None
    except (ValueError, yaml.YAMLError) as error:  # invalid JSON or YAML, or not text
        reason = str(error).splitlines()[0]
        raise ResultsError(f"{path} is damaged ({reason}); delete its folder to run that trial again") from error
