"""Harness that kills a training run at chosen or random moments, and checks what is left of it.

A `Victim` is one run of the tiny recipe. It is killed and started again with the same command. At its end, its metrics must
equal those of an undisturbed run bit by bit.
"""

from __future__ import annotations

import random
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llmtrain.run_files import complete_checkpoints
from llmtrain.train.checkpoint_files import find_corruption, read_state
from tests.chaos.broken_launch import launch
from tests.chaos.broken_rank import SECOND_WRITE
from tests.end_to_end.runs import Runs, family_of, is_gone, ranks_of, wait_until
from tests.mother import Process, session

START_SECONDS = 120.0


@dataclass
class Damage:
    """Counts of one victim's kills, by their circumstances."""

    kills: int = 0
    whole_groups: int = 0
    in_writes: int = 0
    """Kills that left a half-written checkpoint."""
    before_training: int = 0
    """Kills while the ranks were starting."""
    steps_lost: list[int] = field(default_factory=list)
    """Steps per kill that had been trained and had to be trained again."""


class Victim:
    """Run with a name and overrides of its own. If it is `fresh`, its launchers are new interpreters, so kills may also hit their
    imports."""

    def __init__(self, runs: Runs, name: str, *overrides: str, fresh: bool = False):
        self.runs, self.name, self.overrides, self.fresh = runs, name, overrides, fresh
        self.checkpoints = runs.path(name) / "checkpoints"
        self.damage = Damage()
        self._newest = -1

    def start(self, *more: str) -> Process | subprocess.Popen:
        return self.runs.start(self.runs.command(self.name, *self.overrides, *more), self.fresh)

    def finish(self) -> str:
        """Train to the end, and return the output."""
        process = self.start()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def kill_all(self, process: Process | subprocess.Popen) -> None:
        """Kill the launcher, in which torchrun runs, the server and all ranks."""
        for one in family_of(process):
            kill(one)
        process.communicate(timeout=30)

    def kill_one(self, process: Process | subprocess.Popen, chosen: int, seconds: float) -> None:
        """Kill one rank; the others must end by themselves within `seconds`. Kill all processes if there is no rank yet."""
        family, ranks = family_of(process), ranks_of(process)
        if not ranks:
            return self.kill_all(process)
        kill(ranks[chosen % len(ranks)])
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 1, output
        wait_until(lambda: all(map(is_gone, family)), "ranks outlive their launcher", 10)
        return None

    def look(self) -> None:
        """Check that the newest complete checkpoint is still there, and that no complete one is damaged."""
        there = complete_checkpoints(self.checkpoints)
        newest = max(there, default=-1)
        assert newest >= self._newest, f"step {self._newest} was complete, now {newest} is the newest"
        self._newest = newest
        for path in there.values():
            assert (found := find_corruption(path, read_state(path)["files"])) is None, f"{path}: {found}"

    def last_step(self) -> int:
        """Return the last step of the metrics; 0 if there are none, or if the last line is incomplete."""
        path = self.runs.path(self.name) / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        return self.runs.lines(self.name)[-1]["step"] if whole and whole == text.splitlines() else 0

    def kill_at_random(self, draw: random.Random, timeout_seconds: float) -> bool:
        """Start the run, and kill it at a random moment, mostly during training. Return False if it ended before."""
        process = self.start(f"run.timeout_seconds={timeout_seconds}")
        if draw.random() < 0.15:
            time.sleep(draw.uniform(0, 8))
            self.damage.before_training += 1
        else:
            before = self._size()
            wait_until(lambda: self._size() > before or process.poll() is not None, "no step", START_SECONDS)
            time.sleep(draw.uniform(0, 2.5))
        if process.poll() is not None:
            process.communicate()
            return False
        group = draw.random() < 0.5
        if group:
            self.kill_all(process)
        else:
            self.kill_one(process, draw.randrange(16), timeout_seconds + 30)
        self.damage.kills += 1
        self.damage.whole_groups += group
        self.damage.in_writes += bool(list(self.checkpoints.glob("*.tmp")))
        self.look()
        self.damage.steps_lost.append(max(0, self.last_step() - max(0, self._newest)))
        return True

    def kill_in_a_write(self, file: Path) -> None:
        """Kill all processes once rank 0 has written its part of the second checkpoint, and rank 1 has stopped before its own.
        Rank 1 creates `file`."""
        arguments = self.runs.command(self.name, *self.overrides)[2:]
        call = (launch, SECOND_WRITE, "SIGSTOP", "1", str(file), *arguments)
        process = session().fork(*call, environment=self.runs.environment, capture=True)
        wait_until(
            lambda: file.exists() and list(self.checkpoints.glob("step-*.tmp/__0_*")),
            "no checkpoint is half written",
            START_SECONDS,
        )
        self.kill_all(process)
        self.look()

    def _size(self) -> int:
        path = self.runs.path(self.name) / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
