"""Checkpoints to evaluate: folders that transformers loads, and checkpoints of runs, exported to such folders first."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import ModelError, UserError
from llmtrain.train.integrity import NAME, list_checkpoints

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


def find_checkpoints(path: Path, label: str, step: int | None, over_time: bool) -> list[Checkpoint]:
    """Return the checkpoints to evaluate for a path given by the user, oldest first.

    Checkpoints of runs are exported, and every folder has passed `check_folder`. Raises UserError if the path is
    neither a run nor a model, or if the step does not exist.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such folder; give a run (runs/NAME) or a folder that transformers loads")
    if not (path / "recipe.yaml").is_file():
        found = [_of_model_folder(path, label, step)]
    elif over_time:
        steps = sorted({known for known, _ in list_checkpoints(path / "checkpoints")} | set(_exports(path)))
        if not steps:
            raise ModelError(f"{path} has no complete checkpoint; train it until it writes one (checkpoint.every)")
        found = [_of_run(path, label, each) for each in steps]
    else:
        found = [_of_run(path, label, step)]
    for checkpoint in found:
        check_folder(checkpoint.folder)
    return found


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
        found.append("/".join(these[-length:]))
    return found


def check_folder(folder: Path) -> None:
    """Raise ModelError unless `folder` has a configuration, a tokenizer and complete safetensors files.

    Weights in pytorch_model*.bin files are accepted without a check.
    """
    from safetensors import SafetensorError, safe_open

    for name, what in (("config.json", "a model"), ("tokenizer_config.json", "a tokenizer")):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} has no {name}, so it is not a folder with {what} that transformers loads; "
                "give a run, or what `python -m llmtrain export` made"
            )
    if any(folder.glob("pytorch_model*.bin")):
        return  # only loading such a file shows whether it is complete
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} is damaged; export the model again") from None
    for path in [folder / name for name in names or ["model.safetensors"]]:
        if not path.is_file():
            raise ModelError(f"{path} is missing; export the model again")
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{path} is damaged or cut short ({reason}); export the model again") from None


def is_main_process() -> bool:
    """Return whether this process writes the results: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def _of_model_folder(path: Path, label: str, step: int | None) -> Checkpoint:
    """Return the checkpoint in a model folder; its step is known if the folder is an export below a run."""
    named = NAME.match(path.name)
    run = path.resolve().parent.parent
    known = int(named[1]) if named and (run / "recipe.yaml").is_file() else None
    if step not in (None, known):
        raise UserError(f"--step {step}: {path} is one model, not a run with checkpoints; leave --step out")
    return Checkpoint(label, path, path, known, None if known is None else _tokens(run, known))


def _of_run(run: Path, label: str, step: int | None) -> Checkpoint:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"{run} is a run, and several processes can't export it at once; first `python -m llmtrain export {run}`, "
            f"then evaluate the folder in {run}/export"
        )
    exports = _exports(run)
    there = dict(list_checkpoints(run / "checkpoints"))
    if step is None:
        step = max([*there, *exports], default=None)
    if step in exports and step not in there:  # training deletes old checkpoints but not their exports
        return Checkpoint(label, exports[step], run, step, _tokens(run, step))
    from llmtrain.export.export import exported
    from llmtrain.export.source import find_source

    source = find_source(run, step)
    return Checkpoint(label, exported(run, source.step), run, source.step, source.tokens)


def _exports(run: Path) -> dict[int, Path]:
    """Return {step: folder} of the run's exports of the replicas' mean."""
    named = ((NAME.fullmatch(path.name), path) for path in run.glob("export/step-*"))
    return {int(match[1]): path for match, path in named if match and (path / "export.json").is_file()}


def _tokens(run: Path, step: int) -> int | None:
    """Return the number of training tokens up to `step` from the run's metrics, or None if it is not recorded."""
    try:
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return next((line["tokens"] for line in lines if line.get("step") == step and "tokens" in line), None)
