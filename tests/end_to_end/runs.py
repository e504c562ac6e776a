"""Runs of a tiny recipe from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/quickstart.yaml"
TINY = [
    *(
        f"model.config.{key}"
        for key in ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=2")
    ),
    *(f"train.{key}" for key in ("sequence_length=32", "micro_batch=2", "global_batch=16", "steps=24")),
    *(f"sync.{key}" for key in ("warmup_steps=2", "period.every=4")),
    *("schedule.warmup_steps=2", "checkpoint.every=6", "eval.every=8", "eval.tokens=4000", "log.every=2"),
    "run.restarts=0",
]
EXACT = (
    "step",
    "tokens",
    "train/loss",
    "train/grad_norm",
    "eval/loss",
    "sync/count",
    "sync/pseudo_grad_norm",
    "comm/bytes_total",
)


class Runs:
    """Starts runs of a tiny recipe in one scratch folder, with `changes` to the environment; token shards are made once."""

    def __init__(self, folder: Path, changes: Mapping[str, str] | None = None):
        self.folder, self.environment = folder, environment() | dict(changes or {})

    def command(self, name: str, *overrides: str) -> list[str]:
        keys = [f"run.name={name}", f"run.out_dir={self.folder / 'runs'}", f"data.cache_dir={self.folder / 'data'}"]
        return ["bash", "launch/train.sh", RECIPE, *TINY, *keys, *overrides]

    def start(self, command: list[str]) -> subprocess.Popen:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, name: str, *overrides: str) -> tuple[int, str]:
        """(exit code, output)."""
        process = self.start(self.command(name, *overrides))
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.path(name) / "metrics.jsonl").read_text().splitlines()]

    def wait_for(self, name: str, step: int) -> None:
        """Until the checkpoint of `step` is there."""
        deadline = time.monotonic() + 120
        while not (self.path(name) / f"checkpoints/step-{step:08d}").exists():
            assert time.monotonic() < deadline, f"no checkpoint of step {step} in 120 s"
            time.sleep(0.02)


def environment() -> dict[str, str]:
    """This machine's, with the interpreter of the tests in front."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1"}


def exact(line: dict) -> dict:
    """What must not differ by one bit between two runs."""
    return {key: line[key] for key in EXACT if key in line}
