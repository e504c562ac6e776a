"""Request for an export: the checkpoint, the weights and the format that a user asks for. This module does not import torch, so that
a mistyped option is reported at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmtrain.checkpoint_retention import BEST, best_step, read_losses
from llmtrain.errors import CheckpointError, UserError
from llmtrain.run_files import CHECKPOINTS, complete_checkpoints, is_run, step_name

if TYPE_CHECKING:
    from llmtrain.export.folder import Manifest
    from llmtrain.export.source import Source

DTYPES = ("fp32", "bf16")
"""Available dtypes for the weights."""
SIZE = re.compile(r"\s*(?=[\d.]*[1-9])\d+(\.\d+)?\s*[KMGT]B\s*", re.IGNORECASE)


Step = int | Literal["best"]
"""Step of a checkpoint, or the name of the best one."""


def parse_step(text: str | None) -> Step | None:
    """Parse `--step`: a number, or `best`. Raises UserError for anything else."""
    if text is None:
        return None
    if text == BEST:
        return BEST
    if not re.fullmatch(r"\d+", text):
        raise UserError(f"--step is {text!r}; expected a number such as 1000, or best: the lowest validation loss")
    return int(text)


def choose_step(run: Path, step: Step | None = None) -> int:
    """Return `step`, the step of the best checkpoint, or by default the newest step with a checkpoint in `run`.

    Raises CheckpointError if that checkpoint does not exist; the message lists the available steps.
    """
    if not is_run(run):
        what = "is not a run directory (it has no recipe.yaml)" if run.exists() else "does not exist"
        raise CheckpointError(f"{run} {what}; give one that training made, such as runs/quickstart")
    there = complete_checkpoints(run / CHECKPOINTS)
    if not there:
        raise CheckpointError(f"{run} has no complete checkpoint; train it until it writes one (checkpoint.every)")
    steps = ", ".join(str(known) for known in there)
    if step == BEST:
        best = best_step(read_losses(run / CHECKPOINTS))
        if best is None:
            raise CheckpointError(
                f"{run} has no checkpoint whose step was validated, so none is the best; choose --step of {steps}, or let eval.every "
                "divide checkpoint.every"
            )
        return best
    if step is not None and step not in there:
        raise CheckpointError(f"{run} has no checkpoint of step {step}; there are: {steps}")
    return max(there) if step is None else step


@dataclass(frozen=True)
class WeightSource:
    """Choice of weights: `mean`, `anchor`, or `replica` with its number."""

    kind: str
    replica: int | None = None

    @classmethod
    def parse(cls, text: str) -> WeightSource:
        """Parse `mean`, `anchor` or `replica:K`. Raises UserError for anything else."""
        if text in ("mean", "anchor"):
            return cls(text)
        if match := re.fullmatch(r"replica:(\d+)", text):
            return cls("replica", int(match[1]))
        raise UserError(f"--weights is {text!r}; expected mean, anchor, or replica:K such as replica:0")

    def __str__(self) -> str:
        return self.kind if self.replica is None else f"{self.kind}:{self.replica}"

    def describe(self, replicas: int, validates_anchor: bool = False) -> str:
        """Return a description of the choice, for a run with `replicas` replicas. With `validates_anchor`, the run validates
        the anchor instead of the replicas' mean."""
        if self.kind == "anchor" or (self.kind == "mean" and validates_anchor):
            return "the anchor (the last synchronization's result)"
        if self.kind == "replica":
            return f"replica {self.replica} of {replicas}, alone"
        return f"the mean of {replicas} replicas" if replicas > 1 else "the one replica's"


MEAN = WeightSource("mean")


@dataclass(frozen=True)
class Request:
    """Export options: weights, dtype and file size."""

    weights: WeightSource = MEAN
    dtype: str = "fp32"
    max_shard_size: str | None = None
    """Maximum size of a weight file. None means the size of an existing export, or else MAX_SHARD_SIZE."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype is {self.dtype!r}; expected {' or '.join(DTYPES)}")
        if self.max_shard_size is not None and not SIZE.fullmatch(self.max_shard_size):
            raise UserError(f"--max-shard-size is {self.max_shard_size!r}; expected a size such as 500MB or 5GB")

    def folder_of(self, source: Source) -> Path:
        """Return the default folder below the run. Its name contains the weights and the dtype if they are not the defaults."""
        weights = "" if self.weights == MEAN else f"-{self.weights}".replace(":", "")
        dtype = "" if self.dtype == "fp32" else f"-{self.dtype}"
        return source.run / "export" / f"{step_name(source.step)}{weights}{dtype}"

    def is_met_by(self, manifest: Manifest, source: Source) -> bool:
        """Return whether an existing export has the requested checkpoint, weights, dtype and file size."""
        return (
            (manifest.step, manifest.checkpoint) == (source.step, source.digest)
            and (manifest.weights, manifest.dtype) == (str(self.weights), self.dtype)
            and self.max_shard_size in (None, manifest.max_shard_size)
        )
