"""Execution of one trial: a recipe trained on the hosts of a cluster under a condition, and its record."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.compare.cluster import Host
from llmtrain.compare.comparison import Comparison, Stage, TrialSpec
from llmtrain.compare.faults import Faults, host_events
from llmtrain.config import Recipe
from llmtrain.errors import DONE

POLL_SECONDS = 0.2
START_SECONDS = 300.0
"""Seconds for ranks to log their first line, in addition to the recipe's own timeout."""
LAST_LINES = 20
GOES_ON = "goes on"
"""State of a run that stopped so that its next stage can continue it."""


@dataclass
class TrialRecord:
    """Content of trial.json, whose existence means that the trial has ended."""

    condition: str
    run: str
    seed: int
    state: str
    """`done`, `failed`, or `stopped` if it reached the time limit."""
    exit_codes: list[int | None]
    """Exit code of each host's torchrun; negative if a signal killed it."""
    wall_seconds: float
    recipe: str
    overrides: list[str]
    condition_in_words: str
    commit: str | None
    hosts: list[dict[str, Any]]
    """Name and address of each host, and the bytes sent and received by its network card."""
    last_lines: list[str]
    """Last output lines of the host that failed first."""

    def write(self, directory: Path) -> None:
        """Write trial.json into `directory`, completely or not at all."""
        partial = directory / "trial.json.partial"
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n")
        partial.rename(directory / "trial.json")


def record_of(directory: Path) -> dict[str, Any] | None:
    """Return a trial's record, or None if the trial has not ended."""
    path = directory / "trial.json"
    return json.loads(path.read_text()) if path.exists() else None


@dataclass(frozen=True)
class TrialRun:
    """A trial on the hosts of a cluster. `on_progress` is called regularly with the run's step."""

    planned: TrialSpec
    comparison: Comparison
    recipe: Recipe
    hosts: Sequence[Host]
    port: int
    words: str
    on_progress: Callable[[int], None]

    def run(self) -> TrialRecord:
        """Train until all hosts have ended, and return the record. A failing run raises nothing; the record says so."""
        planned = self.planned
        shutil.rmtree(planned.directory, ignore_errors=True)  # left by an interrupted trial; times not comparable
        planned.directory.mkdir(parents=True)
        before = [_counters(host) for host in self.hosts]
        started = time.monotonic()
        for stage in planned.stages:
            state, exit_codes, last_lines = self._run_stage(stage)
            if state != GOES_ON:  # the last stage never returns it
                break
        return TrialRecord(
            condition=planned.condition,
            run=planned.run,
            seed=planned.seed,
            state=state,
            exit_codes=exit_codes,
            wall_seconds=round(time.monotonic() - started, 2),
            recipe=os.path.relpath(planned.recipe),
            overrides=list(planned.overrides),
            condition_in_words=self.words,
            commit=_commit(),
            hosts=[_counters(host, old) for host, old in zip(self.hosts, before, strict=True)],
            last_lines=last_lines,
        )

    def _run_stage(self, stage: Stage) -> tuple[str, list[int | None], list[str]]:
        """Train on the first hosts, and kill those that hang. Return (state, exit codes, last lines).

        Hosts have `patience` seconds to log a first line, and to end after the first failure or the request to stop.
        """
        hosts, directory = self.hosts[: stage.replicas], self.planned.directory
        metrics, summary = directory / "metrics.jsonl", directory / "summary.json"
        condition = self.comparison.conditions[self.planned.condition]
        faults = Faults(seed=self.planned.seed, hosts=len(hosts), delays=condition.delays, garbage=condition.garbage)
        events = host_events(condition, self.hosts)
        patience = self.recipe.run.timeout_seconds + START_SECONDS
        time_limit, last_step = 60 * (self.comparison.stop_after_minutes or math.inf), stage.until or math.inf
        earlier = _size(metrics)
        processes = [self._start(host, number, stage, faults) for number, host in enumerate(hosts)]
        must_end_at = time.monotonic() + patience
        began = first_failed = stopped_at = None
        while any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if began is not None:
                step = step_of(metrics)
                while events and events[0][0] <= now - began:
                    events.pop(0)[1]()
                if stopped_at is None and (step >= last_step or now - began > time_limit):
                    stopped_at, must_end_at = step, now + patience
                    for process in processes:
                        process.send_signal(signal.SIGTERM)
                self.on_progress(step)
            elif _size(metrics) > earlier:
                began, must_end_at = now, math.inf
            failed = [number for number, process in enumerate(processes) if process.poll() not in (None, DONE)]
            if failed and first_failed is None:
                first_failed, must_end_at = failed[0], min(must_end_at, now + patience)
            if now > must_end_at:
                for host in hosts:
                    host.kill()
        for pause in condition.pauses:
            self.hosts[pause.host].resume()
        codes = [process.returncode for process in processes]
        if any(code != DONE for code in codes):
            if stopped_at is not None and summary.exists() and json.loads(summary.read_text())["stopped"] == "signal":
                return GOES_ON if stopped_at >= last_step else "stopped", codes, []
            return "failed", codes, _last_lines(directory / f"{hosts[first_failed or 0].name}.log")
        if stage.until is not None:
            return "failed", codes, [f"the run was over before it was stopped after step {stage.until}: train longer"]
        return "done", codes, []

    def _start(self, host: Host, number: int, stage: Stage, faults: Faults) -> subprocess.Popen:
        """Start torchrun on a host: one CPU thread per rank, and no GPU, because hosts would all share the same one."""
        ranks = self.comparison.hosts.processes
        nodes = ["--nnodes", stage.replicas, "--node-rank", number, "--nproc-per-node", ranks]
        master = ["--master-addr", self.hosts[0].address, "--master-port", self.port]
        rank = ["-m", "llmtrain.compare.rank", faults.model_dump_json(), self.planned.recipe]
        command = ["-m", "torch.distributed.run", *nodes, *master, *rank, *self.planned.overrides_of(stage)]
        env = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": host.interface,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.recipe.run.timeout_seconds)),
        }
        with (self.planned.directory / f"{host.name}.log").open("a") as log:
            return host.popen(
                [sys.executable, *map(str, command)], env=os.environ | env, stdout=log, stderr=subprocess.STDOUT
            )


def _size(path: Path) -> int:
    """Return a file's size in bytes, or 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def step_of(metrics: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, or 0 if it has none."""
    if metrics.exists():
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 8192))
            *lines, _ = file.read().split(b"\n")
        for line in reversed(lines):
            with suppress(ValueError):
                return int(json.loads(line)["step"])
    return 0


def _counters(host: Host, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a host's name, address, and bytes sent and received, since `before` if given."""
    counts = {"sent": host.sent(), "received": host.received()}
    if before is not None:
        counts = {key: None if count is None else count - before[key] for key, count in counts.items()}
    return {"name": host.name, "address": host.address, **counts}


def _last_lines(log: Path) -> list[str]:
    """Return the last lines that the ranks wrote, without torchrun's report on the failure."""
    lines = log.read_text(errors="replace").splitlines()
    own = list(itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
    return (own or lines)[-LAST_LINES:]


def _commit() -> str | None:
    """Return the commit of the code that runs, or None if it is not in a git checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
