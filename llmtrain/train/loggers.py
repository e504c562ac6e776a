"""Destinations of log lines: metrics.jsonl always, TensorBoard if the recipe wants it. A new one subclasses `Logger`."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtrain.train.checkpoint_writer import atomic_write


class Logger(ABC):
    """Destination of log lines on the main rank. Its methods raise OSError if the disk refuses to write."""

    @abstractmethod
    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        """Record one line: the global step, training tokens of all replicas, training seconds and values by tag."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class JsonlLogger(Logger):
    """metrics.jsonl, one JSON object per line; values that are not finite are null."""

    def __init__(self, path: Path, resumed_step: int):
        """Open the file and drop the lines after `resumed_step`, which will be logged again."""
        # Without a checkpoint everything is done again, also the validation before the first step.
        kept = [line for line in read_lines(path) if line["step"] <= resumed_step] if resumed_step else []
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        values = {tag: value if math.isfinite(value) else None for tag, value in tags.items()}
        self._file.write(json.dumps({"step": step, "tokens": tokens, "seconds": round(seconds, 3), **values}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger(Logger):
    """TensorBoard event files."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else 0)

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        for tag, value in tags.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


def open_loggers(jsonl: Path, tensorboard: Path | None, resumed_step: int) -> Sequence[Logger]:
    """Open the loggers of a run that continues after `resumed_step`; 0 for a new run. Raises OSError."""
    loggers: list[Logger] = [JsonlLogger(jsonl, resumed_step)]
    if tensorboard is not None:
        loggers.append(TensorBoardLogger(tensorboard, resumed_step))
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
