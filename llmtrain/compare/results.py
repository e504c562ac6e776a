"""What trials left behind: run directories, read back for a report. Failed ones too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from llmtrain.errors import ResultsError

AS_RUN = "as run"
"""The condition of runs that no comparison started: whatever their cluster was like."""
DONE, FAILED, STOPPED, UNFINISHED = "done", "failed", "stopped", "unfinished"
"""States of a trial; unfinished is a run directory that nobody closed: still running, or killed."""

STATE_OF_SUMMARY = {"done": DONE, "signal": STOPPED, "error": FAILED}
ALWAYS_THERE = ("step", "tokens", "seconds")


@dataclass(frozen=True)
class HostTraffic:
    """A host's interface counters over a trial, in bytes; None where they were not read (loopback)."""

    name: str
    sent: int | None
    received: int | None


@dataclass(frozen=True)
class Span:
    """From `start` to `end` (Unix seconds) a rank did `kind`; `bytes` is a message's."""

    kind: str
    name: str
    step: int
    start: float
    end: float
    bytes: float | None = None


@dataclass(frozen=True)
class Trial:
    """One run under one condition with one seed. `method` is None where the run broke before it wrote its recipe."""

    path: Path
    condition: str
    run: str
    seed: int
    state: str
    method: str | None
    averages_every_step: bool
    """Whether this is synchronous data parallelism: what other runs are measured against, unless the user chose."""
    lines: tuple[dict[str, Any], ...]
    """metrics.jsonl; null is a value that was not finite."""
    summary: dict[str, Any] | None = None
    exit_codes: tuple[int | None, ...] = ()
    hosts: tuple[HostTraffic, ...] = ()
    condition_in_words: str | None = None
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    commit: str | None = None
    machine: str | None = None
    wall_seconds: float | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages and captions."""
        return f"{self.condition} · {self.run} · seed {self.seed}"

    @cached_property
    def spans(self) -> dict[int, list[Span]]:
        """By rank, what it did in the traced steps, in order of time; empty where nothing was traced."""
        traced = {}
        for path in sorted((self.path / "trace").glob("rank-*.jsonl")):
            objects = (value for value in _json_lines(path) if _is_span(value))
            spans = [
                Span(**{part.name: value[part.name] for part in fields(Span) if part.name in value})
                for value in objects
            ]
            if spans:
                traced[int(path.stem.removeprefix("rank-"))] = sorted(spans, key=lambda span: span.start)
        return traced


def load_trials(directories: Sequence[Path]) -> list[Trial]:
    """Every trial in or below `directories`, in order of their paths.

    A trial is a folder with trial.json, or any run directory of llmtrain (metrics.jsonl beside recipe.yaml). A trial of a
    comparison that has no trial.json has not ended and is left out. Raises ResultsError where a directory holds none,
    and where two of them have the same condition, run and seed.
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
        path = Path(folder)
        if "trial.json" in files:
            yield path
        elif {"metrics.jsonl", "recipe.yaml"} <= set(files):
            if not _in_a_comparison(path):
                yield path
        else:
            below.sort()
            continue
        below.clear()


def _in_a_comparison(path: Path) -> bool:
    parents = path.resolve().parents
    return len(parents) > 2 and (parents[2] / "comparison.yaml").exists()


def _load(path: Path) -> Trial:
    told = _json(path / "trial.json") or {}
    summary = _json(path / "summary.json")
    recipe = _recipe(path / "recipe.yaml")
    sync, run = recipe.get("sync") or {}, recipe.get("run") or {}
    try:
        return Trial(
            path=path,
            condition=told.get("condition", AS_RUN),
            run=told.get("run", path.resolve().name),
            seed=int(told.get("seed", run.get("seed", 0))),
            state=told.get("state") or _state(summary),
            method=sync.get("method"),
            averages_every_step=(sync.get("period") or {}).get("kind") == "every_step",
            lines=tuple(_metrics(path / "metrics.jsonl")),
            summary=summary,
            exit_codes=tuple(told.get("exit_codes") or ()),
            hosts=tuple(
                HostTraffic(host["name"], host.get("sent"), host.get("received")) for host in told.get("hosts") or ()
            ),
            condition_in_words=told.get("condition_in_words"),
            recipe=told.get("recipe"),
            overrides=tuple(told.get("overrides") or ()),
            commit=told.get("commit"),
            machine=told.get("machine"),
            wall_seconds=told.get("wall_seconds"),
            last_lines=tuple(told.get("last_lines") or ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ResultsError(
            f"{path} is not what a trial leaves behind ({error!r}); delete it to run it again"
        ) from error


def _state(summary: dict[str, Any] | None) -> str:
    return STATE_OF_SUMMARY.get((summary or {}).get("stopped", ""), UNFINISHED)


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    return (line for line in _json_lines(path) if all(line.get(tag) is not None for tag in ALWAYS_THERE))


def _is_span(value: dict[str, Any]) -> bool:
    return {"kind", "name", "step", "start", "end"} <= set(value)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of one a line. A line that a killed writer cut off is skipped."""
    if not path.exists():
        return
    for text in path.read_text(errors="replace").splitlines():
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            yield value


def _json(path: Path) -> dict[str, Any] | None:
    """An object, or None without the file."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise ResultsError(f"{path} is damaged ({error}); delete its folder to run that trial again") from error
    if not isinstance(value, dict):
        raise ResultsError(f"{path} holds no JSON object; delete its folder to run that trial again")
    return value


def _recipe(path: Path) -> dict[str, Any]:
    """As plain mappings: a report needs a few words of it, and it may be another version's."""
    if not path.exists():
        return {}
    try:
        value = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ResultsError(
            f"{path} is damaged ({str(error).splitlines()[0]}); delete its folder to run it again"
        ) from error
    return value if isinstance(value, dict) else {}
