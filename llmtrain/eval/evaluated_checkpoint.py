"""Checkpoints to evaluate: folders that transformers loads, and checkpoints of runs, which are first exported to such folders.

Only the export imports torch, so that a mistyped path is reported at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from llmtrain.checkpoint_retention import BEST
from llmtrain.errors import ModelError, UserError, one_line
from llmtrain.export.request import Step, choose_step
from llmtrain.files import nearest_existing, read_lines
from llmtrain.parallel.world import environment_number
from llmtrain.run_files import CHECKPOINTS, EXPORT_MANIFEST, METRICS, STEP_NAME, complete_checkpoints, is_run

SMALL_FILES = (".json", ".txt", ".model")
"""Suffixes of configuration and tokenizer files."""
WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class Checkpoint:
    """Model folder to evaluate, with its position in training."""

    label: str
    """Name of its run in the table."""
    folder: Path
    home: Path
    """Run directory, or the model folder itself; results go to its `eval/` unless --out is given."""
    step: int | None = None
    """Training steps; None if unknown."""
    tokens: int | None = None
    """Training tokens of all replicas; None if unknown."""

    def fingerprint(self) -> str:
        """Return a digest that changes with the weights, the configuration or the tokenizer.

        Small files are hashed by content, weight files by size and modification time.
        """
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path.suffix in SMALL_FILES:
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
            elif path.suffix in WEIGHTS:
                stat = path.stat()
                digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        return digest.hexdigest()[:16]


def find_checkpoints(path: Path, label: str, step: Step | None, over_time: bool) -> list[Checkpoint]:
    """Return the checkpoints to evaluate for a path given by the user, oldest first. Of a run, these are all checkpoints and exports
    with `over_time`, the one after `step` if that is given, and otherwise the newest checkpoint, or the newest export if the run
    has no checkpoint.

    Checkpoints of runs are exported. Every folder has passed `check_model_folder`. Raises UserError as `check_model_path` does.
    """
    from llmtrain.export.folder import check_export

    check_model_path(path, step)
    if not is_run(path):
        check_export(path)
        return [_of_model_folder(path, label)]
    if over_time:
        steps = _steps(path)
    elif step is None:
        steps = [max(complete_checkpoints(path / CHECKPOINTS) or _exports(path))]
    else:
        steps = [choose_step(path, BEST) if step == BEST else step]
    found = [_of_run(path, label, each) for each in steps]
    for checkpoint in found:
        check_model_folder(checkpoint.folder)
    return found


def check_model_path(path: Path, step: Step | None) -> None:
    """Raise UserError unless `path` is a folder that transformers loads, or a run with a checkpoint or an export of `step` (of any
    step if None)."""
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such folder; give a run (runs/NAME) or a folder that transformers loads")
    if not is_run(path):
        if step not in (None, _step_of(path)):
            raise UserError(f"--step {step}: {path} is one model, not a run with checkpoints; leave --step out")
        check_model_folder(path)
    elif environment_number("WORLD_SIZE", 1) > 1:
        raise UserError(
            f"{path} is a run, and several processes can't export it at once; first `llmtrain export {path}`, "
            f"then evaluate the folder in {path}/export"
        )
    elif (step is None and not _steps(path)) or (step is not None and step not in _steps(path)):
        choose_step(path, step)  # raises the error that lists the available steps


def has_step(path: Path, step: Step) -> bool:
    """Return whether `path` is a run that can be evaluated after `step`."""
    if not is_run(path):
        return False
    try:
        return (choose_step(path, BEST) if step == BEST else step) in _steps(path)
    except UserError:  # no checkpoint has a validation loss
        return False


def _steps(run: Path) -> list[int]:
    """Return the steps after which a run can be evaluated, oldest first."""
    return sorted({*complete_checkpoints(run / CHECKPOINTS), *_exports(run)})


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a unique label for each path: the fewest last parts that distinguish it from the others.

    Raises UserError if a path is given twice.
    """
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        twice = next(path for path, these in zip(paths, parts, strict=True) if parts.count(these) > 1)
        raise UserError(f"{twice} is given twice; leave one out")
    found = []
    for these in parts:
        length = next(n for n in range(1, len(these) + 1) if sum(other[-n:] == these[-n:] for other in parts) == 1)
        found.append("/".join(these[-length:]).lstrip("/"))  # the first part of a path is its root
    return found


def same(path: Path, paths: Sequence[Path]) -> int | None:
    """Return the index of `path` in `paths`, comparing resolved paths, or None if it is not among them."""
    resolved = [each.resolve() for each in paths]
    return resolved.index(path.resolve()) if path.resolve() in resolved else None


def check_model_folder(folder: Path) -> None:
    """Raise ModelError unless `folder` has a configuration, a tokenizer and complete safetensors files.

    Weights in pytorch_model*.bin files are accepted without a check.
    """
    for name, what in (("config.json", "a model"), ("tokenizer_config.json", "a tokenizer")):
        if not os.path.isfile(folder / name):
            raise ModelError(
                f"{folder} has no {name}, so it is not a folder with {what} that transformers loads; "
                "give a run, or what `llmtrain export` made"
            )
    if any(folder.glob("pytorch_model*.bin")):
        return  # only loading such a file shows whether it is complete
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    is_split = (
        index.is_file() and not single.is_file()
    )  # transformers takes the single file, whatever an old index says
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if is_split else [single.name]
        names = sorted(set(files))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} is damaged; export the model again") from None
    for path in [folder / name for name in names or [single.name]]:
        if not os.path.isfile(path):
            raise ModelError(f"{path} is missing; export the model again")
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or cut short ({one_line(error)}); export the model again") from None


def check_can_write(folder: Path) -> None:
    """Raise UserError unless a folder for results exists, or can be made, and can be written."""
    there = nearest_existing(folder)
    if not there.is_dir():
        raise UserError(f"{folder}: {there} is a file; choose another folder with --out")
    if not os.access(there, os.W_OK):
        raise UserError(f"{folder}: {there} can't be written; choose another folder with --out")


def is_main_process() -> bool:
    """Return whether this process writes the results: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def _step_of(folder: Path) -> int | None:
    """Return the step of a model folder if it is an export below a run, else None."""
    named = STEP_NAME.match(folder.name)
    return int(named[1]) if named and is_run(folder.resolve().parent.parent) else None


def _of_model_folder(path: Path, label: str) -> Checkpoint:
    step = _step_of(path)
    return Checkpoint(label, path, path, step, None if step is None else _tokens(path.resolve().parent.parent, step))


def _of_run(run: Path, label: str, step: int) -> Checkpoint:
    from llmtrain.export.export import exported
    from llmtrain.export.folder import check_export
    from llmtrain.export.source import find_source

    if step not in complete_checkpoints(run / CHECKPOINTS):  # training deletes old checkpoints but not their exports
        folder = _exports(run)[step]
        check_export(folder)
        return Checkpoint(label, folder, run, step, _tokens(run, step))
    return Checkpoint(label, exported(run, step), run, step, find_source(run, step).tokens)


def _exports(run: Path) -> dict[int, Path]:
    """Return {step: folder} of the run's exports of the replicas' mean in fp32."""
    named = ((STEP_NAME.fullmatch(path.name), path) for path in run.glob("export/step-*"))
    return {int(match[1]): path for match, path in named if match and (path / EXPORT_MANIFEST).is_file()}


def _tokens(run: Path, step: int) -> int | None:
    """Return the number of training tokens up to `step` from the run's metrics, or None if it is not recorded."""
    try:
        lines = read_lines(run / METRICS)
    except OSError:
        return None
    return next((line["tokens"] for line in lines if line["step"] == step and "tokens" in line), None)
