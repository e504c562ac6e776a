"""The `llmtrain eval` command, which evaluates runs and model folders, writes result files and prints a table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import llmtrain
from llmtrain.doctor.machine import installed_version
from llmtrain.eval.evaluated_checkpoint import (
    Checkpoint,
    check_can_write,
    find_checkpoints,
    has_step,
    is_main_process,
    labels,
    same,
)
from llmtrain.eval.scores import SEPARATE, Cache, write_json
from llmtrain.eval.table import Evaluated, comparison, draw_curves, rows_of, scores_on_one_line, table_of, without_rows
from llmtrain.eval.texts import check_device
from llmtrain.eval.units import EvalUnit, LazyModels, Options, units_of
from llmtrain.export.folder import recorded
from llmtrain.export.request import Step
from llmtrain.run_files import EVALUATIONS, step_name
from llmtrain.suites import load_suite, suite_digest

VERSIONS_OF = ("lm_eval", "transformers", "torch", "datasets")


def evaluate(
    paths: Sequence[Path],
    suite: str,
    *,
    over_time: bool = False,
    step: Step | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    data_dir: Path | None = None,
    device: str | None = None,
    baseline: Path | None = None,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Evaluate runs or model folders on a suite, write and show the results, and return them. The caller must have checked the
    arguments with `check_arguments`, which imports much less.

    `limit` is the maximum number of documents per task or text, and `batch_size` the number of sequences per batch.
    With `over_time`, every checkpoint of a run is evaluated. Processes other than the main one return an empty
    list.
    """
    check_device(device)
    console = Console(quiet=not is_main_process(), highlight=False)
    name, chosen, task_folders = load_suite(suite)
    options = Options(chosen, tuple(task_folders), data_dir, limit, batch_size or chosen.batch_size, device)
    units = units_of(options)
    everything = [*paths] if baseline is None or same(baseline, paths) is not None else [*paths, baseline]
    found = [
        find_checkpoints(path, label, step, over_time)
        if path in paths
        else [_find_baseline(path, label, step, console)]
        for path, label in zip(everything, labels(everything), strict=True)
    ]
    evaluated = [[_evaluate_one(each, units, options, name, out, console) for each in of_path] for of_path in found]
    if not is_main_process():
        return []
    reference = None if baseline is None else evaluated[same(baseline, everything)][-1]
    show, digest = {unit.name: unit.show for unit in units}, suite_digest(chosen, task_folders)
    results = []
    for path, of_path in zip(everything, evaluated, strict=True):
        for each in of_path:
            result = _result(name, each, limit, reference, show) | {"suite_digest": digest}
            results.append(result)
            if path in paths and each is of_path[-1]:
                file = f"{name}.json" if step is None else f"{name}-{step_name(each.checkpoint.step)}.json"
                write_json(_home(each.checkpoint, out) / file, result)
    newest = [of_path[-1] for of_path in evaluated]
    _show(name, newest, reference, units, console)
    if over_time:
        _draw(name, [each for of_path in evaluated for each in of_path], results, show, out, console)
    return results


def _find_baseline(path: Path, label: str, step: Step | None, console: Console) -> Checkpoint:
    """Return the checkpoint of a baseline that is not among the evaluated paths: after `step` if the baseline has it, else the
    newest."""
    is_there = step is not None and has_step(path, step)
    (checkpoint,) = find_checkpoints(path, label, step if is_there else None, over_time=False)
    if step is not None and not is_there and checkpoint.step not in (None, step):
        console.print(f"--step {step}: {label} has none, so the baseline is its step {checkpoint.step}", markup=False)
    return checkpoint


def _evaluate_one(
    checkpoint: Checkpoint, units: Sequence[EvalUnit], options: Options, suite: str, out: Path | None, console: Console
) -> Evaluated:
    """Evaluate one checkpoint, running only the units that are not in the cache."""
    cache = Cache(_home(checkpoint, out) / "cache", checkpoint.fingerprint())
    done = {unit.name: cache.read(unit.name, unit.key) for unit in units}
    models = LazyModels(checkpoint.folder, options)
    where = checkpoint.label + ("" if checkpoint.step is None else f" step {checkpoint.step}")
    missing = [unit for unit in units if done[unit.name] is None]
    if missing and is_main_process():
        # Before the model is loaded. A read-only cache that lacks nothing, such as a baseline's, passes.
        check_can_write(cache.folder)
    if not missing:
        console.print(f"{where}: already evaluated on {suite}", markup=False)
    for number, unit in enumerate(missing, 1):
        console.print(f"{where}: {unit.name} ({number} of {len(missing)})", markup=False)
        if is_main_process() or unit.by_all:
            done[unit.name] = unit.run(models)
        if is_main_process():
            done[unit.name].measured = {"date": _now(), "versions": _versions()}
            cache.write(unit.name, unit.key, done[unit.name])
    models.release()
    return Evaluated(checkpoint, done)


def _result(
    suite: str, each: Evaluated, limit: int | None, baseline: Evaluated | None, show: dict[str, Sequence[str]]
) -> dict[str, Any]:
    checkpoint, entries = each.checkpoint, each.entries
    result: dict[str, Any] = {
        "suite": suite,
        "checkpoint_step": checkpoint.step,
        "model": str(checkpoint.folder),
        "digest": _digest(checkpoint),
        "tokens": checkpoint.tokens,
        "limit": limit,
        "headline": scores_on_one_line(each, show),
        "shown": [[row.name, row.metric] for row in rows_of([each], show)],
        "results": {name: scores for entry in entries.values() for name, scores in entry.scores.items()},
        "tasks": {name: about for entry in entries.values() for name, about in entry.about.items()},
        "measured": {unit: entry.measured for unit, entry in entries.items()},
        "date": _now(),
    }
    written = [sample for entry in entries.values() for sample in entry.written]
    if written:
        result["written"] = written
    if baseline is not None and each is not baseline:
        compared = {row: comparison(each, baseline, row) for row in rows_of([each], show)}
        result["against"] = {
            "baseline": str(baseline.checkpoint.folder),
            "digest": _digest(baseline.checkpoint),
            "scores": [
                {"task": row.name, "metric": row.metric, **vars(found)} for row, found in compared.items() if found
            ],
        }
    return result


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str | None]:
    return {"llmtrain": llmtrain.__version__, **{name: installed_version(name) for name in VERSIONS_OF}}


def _digest(checkpoint: Checkpoint) -> str | None:
    """Return the digest of the training checkpoint from which the folder was exported, or None if the folder is no export."""
    manifest = recorded(checkpoint.folder)
    return None if manifest is None else manifest.checkpoint


def _show(
    suite: str, newest: list[Evaluated], baseline: Evaluated | None, units: Sequence[EvalUnit], console: Console
) -> None:
    show = {unit.name: unit.show for unit in units}
    if rows_of(newest, show):
        limited_to_one = {unit.name for unit in units if unit.key.get("limit") == 1}
        table, notes = table_of(f"suite {suite}", newest, show, baseline, limited_to_one)
        console.print(table)
        for note in notes:
            console.print(note, markup=False)
    for unit, metrics in without_rows(newest[0], show).items():
        console.print(
            f"{unit}: no row, because it has none of the metrics that the suite shows; set `show` to some of: {metrics}",
            markup=False,
        )
    for each in newest:
        for sample in (sample for entry in each.entries.values() for sample in entry.written):
            console.print(
                f"\n{each.checkpoint.label} writes after {sample['prompt']!r}:\n{sample['text']}", markup=False
            )


def _draw(
    suite: str,
    evaluated: list[Evaluated],
    results: list[dict[str, Any]],
    show: dict[str, Sequence[str]],
    out: Path | None,
    console: Console,
) -> None:
    folder = out or _home(evaluated[0].checkpoint, None)
    write_json(folder / f"{suite}-over-time.json", {"suite": suite, "checkpoints": results})
    if rows_of(evaluated, show):
        target = folder / f"{suite}-over-time.png"
        draw_curves(evaluated, show, f"suite {suite}", target)
        console.print(f"curves: {target}", markup=False, soft_wrap=True)
        abouts = [entry.about.items() for each in evaluated for entry in each.entries.values()]
        kinds = {(name, SEPARATE in about) for of_entry in abouts for name, about in of_entry}
        if len(kinds) > len(dict(kinds)):
            console.print(
                "texts were read one document at a time for some checkpoints but not for others, which may explain a part of a curve"
            )


def _home(checkpoint: Checkpoint, out: Path | None) -> Path:
    """Return the folder for the results of a checkpoint."""
    return checkpoint.home / EVALUATIONS if out is None else out / checkpoint.label
