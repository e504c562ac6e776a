"""Destinations of log lines: metrics.jsonl always, TensorBoard and Weights & Biases if the recipe enables them. A new
destination subclasses `Logger`."""

from __future__ import annotations

import json
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtrain.config import Recipe
from llmtrain.train.checkpoint_writer import atomic_write, one_line
from llmtrain.train.run_dir import RunDirectory


class Logger(ABC):
    """Destination of log lines on the main rank. Its methods raise OSError if writing fails."""

    @abstractmethod
    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        """Record one line: the global step, training tokens of all replicas, training seconds and values by tag."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class JsonlLogger(Logger):
    """Logger to metrics.jsonl, one JSON object per line. Values that are not finite are written as null."""

    def __init__(self, path: Path, resumed_step: int):
        """Open the file and drop the lines after `resumed_step`, which will be logged again."""
        # Without a checkpoint, everything is run again, including the validation before the first step.
        kept = [line for line in read_lines(path) if line["step"] <= resumed_step] if resumed_step else []
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        values = {tag: value if math.isfinite(value) else None for tag, value in tags.items()}
        self._file.write(json.dumps({"step": step, "tokens": tokens, "seconds": round(seconds, 3), **values}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger(Logger):
    """Logger to TensorBoard event files."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else 0)

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        for tag, value in tags.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """Logger to Weights & Biases, or with `mode: offline` to a folder for `wandb sync`. A resumed run keeps its id."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, resumed_step: int):
        import wandb

        section = recipe.log.wandb
        id_file = directory.path / "wandb_id.txt"
        if not (resumed_step and id_file.exists()):
            atomic_write(id_file, uuid.uuid4().hex[:8] + "\n")
        try:
            self._run = wandb.init(
                project=section.project,
                entity=section.entity,
                mode=section.mode,
                name=recipe.run.name,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=directory.path,
                config=recipe.model_dump(mode="json"),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise OSError(f"log.wandb: {one_line(error)}; `wandb login`, or log.wandb.mode=offline") from error

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        self._run.log({"tokens": tokens, "seconds": seconds, **tags}, step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # waits for wandb's own process, which may still write the file when finish() returns


def open_loggers(recipe: Recipe, directory: RunDirectory, resumed_step: int) -> Sequence[Logger]:
    """Open the loggers of a run that continues after `resumed_step` (0 for a new run). Raises OSError."""
    loggers: list[Logger] = [JsonlLogger(directory.metrics, resumed_step)]
    if recipe.log.tensorboard:
        loggers.append(TensorBoardLogger(directory.tensorboard, resumed_step))
    if recipe.log.wandb is not None:
        loggers.append(WandbLogger(recipe, directory, resumed_step))
    return loggers


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics.jsonl. Lines that a crash truncated or a disk corrupted are left out."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
    return lines
