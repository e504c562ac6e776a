"""One trial: a recipe trained on the hosts of a cluster under a condition, and the record that is left of it."""

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.compare.cluster import Host
from llmtrain.compare.comparison import Comparison, Stage, TrialSpec
from llmtrain.compare.fault_timeline import FaultTimeline
from llmtrain.compare.faults import Faults
from llmtrain.config import Recipe
from llmtrain.errors import DONE

POLL_SECONDS = 0.2
START_SECONDS = 300.0
"""How long ranks may take to come to their first step, beyond the recipe's own timeout."""
LAST_LINES = 20


@dataclass
class TrialRecord:
    """trial.json."""

    condition: str
    run: str
    seed: int
    state: str
    """`done`, `failed`, or `stopped` when its time was up."""
    exit_codes: list[int | None]
    """Of each host's torchrun; None: killed."""
    wall_seconds: float
    recipe: str
    overrides: list[str]
    condition_in_words: str
    commit: str | None
    hosts: list[dict[str, Any]]
    """name, address, and bytes sent and received by its network card."""
    last_lines: list[str] = field(default_factory=list)
    """Of the host that failed first."""

    def write(self, directory: Path) -> None:
        """To trial.json, which marks the trial as over."""
        partial = directory / "trial.json.partial"
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n")
        partial.rename(directory / "trial.json")


def record_of(directory: Path) -> dict[str, Any] | None:
    """A trial's record, None if it is not over."""
    path = directory / "trial.json"
    return json.loads(path.read_text()) if path.exists() else None


def run_trial(
    planned: TrialSpec,
    comparison: Comparison,
    recipe: Recipe,
    hosts: Sequence[Host],
    port: int,
    words: str,
    on_progress: Callable[[int], None],
) -> TrialRecord:
    """Train on `hosts` until all have ended. `on_progress` is called with the run's step now and then. Raises nothing for a
    run that fails: that is in the record."""
    condition, directory = comparison.conditions[planned.condition], planned.directory
    shutil.rmtree(directory, ignore_errors=True)  # what an interrupted trial left: its times would not be comparable
    directory.mkdir(parents=True)
    events = FaultTimeline(condition, hosts)
    before = [(host.sent(), host.received()) for host in hosts]
    started = time.monotonic()
    ends = (
        _run_stage(stage, planned, comparison, recipe, hosts[: stage.replicas], port, events, on_progress)
        for stage in planned.stages
    )
    end = next(end for end in ends if not end.goes_on)  # the last stage's never does
    return TrialRecord(
        condition=planned.condition,
        run=planned.run,
        seed=planned.seed,
        state=end.state,
        exit_codes=end.codes,
        wall_seconds=round(time.monotonic() - started, 2),
        recipe=os.path.relpath(planned.recipe),
        overrides=list(planned.overrides),
        condition_in_words=words,
        commit=_commit(),
        hosts=[_counters(host, *counted) for host, counted in zip(hosts, before, strict=True)],
        last_lines=end.last_lines,
    )


@dataclass(frozen=True)
class _StageEnd:
    state: str
    codes: list[int | None]
    last_lines: list[str]
    goes_on: bool = False
    """Whether the run stopped where its next stage takes over."""


def _run_stage(
    stage: Stage,
    planned: TrialSpec,
    comparison: Comparison,
    recipe: Recipe,
    hosts: Sequence[Host],
    port: int,
    events: FaultTimeline,
    on_progress: Callable[[int], None],
) -> _StageEnd:
    """Train on these hosts until all have ended."""
    condition, directory = comparison.conditions[planned.condition], planned.directory
    faults = Faults(seed=planned.seed, hosts=len(hosts), delays=condition.delays, garbage=condition.garbage)
    with ExitStack() as files:
        logs = [files.enter_context((directory / f"{host.name}.log").open("a")) for host in hosts]
        processes = [
            host.popen(
                _command(planned, stage, hosts, number, comparison.hosts.processes, port, faults),
                env=_environment(host, recipe),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for number, (host, log) in enumerate(zip(hosts, logs, strict=True))
        ]
        patience, minutes = recipe.run.timeout_seconds + START_SECONDS, comparison.stop_after_minutes
        watch = TrialMonitor(processes, hosts, events, patience, minutes, stage.until)
        watch.until_all_have_ended(directory, on_progress)
    codes = [process.returncode for process in processes]
    if all(code == DONE for code in codes):
        if stage.until is None:
            return _StageEnd("done", codes, [])
        return _StageEnd(
            "failed", codes, [f"the run was over before it was stopped after step {stage.until}: train longer"]
        )
    if watch.stops(directory):
        return _StageEnd("stopped", codes, [], goes_on=watch.came_to_its_last_step)
    return _StageEnd("failed", codes, _last_lines(directory / f"{hosts[watch.first_failed].name}.log"))


class TrialMonitor:
    """Over the hosts' torchruns while they run: what happens at given times, and an end for those that hang.

    `patience`: seconds until the first step, and from the first failure or the request to stop until everybody must have
    ended. `minutes` and `last_step`: when the run is told to stop; None: never.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen],
        hosts: Sequence[Host],
        events: FaultTimeline,
        patience: float,
        minutes: float | None,
        last_step: int | None,
    ):
        self.processes, self.hosts, self.events = processes, hosts, events
        self.patience, self.minutes, self.last_step = patience, minutes, last_step
        self.came_to_its_last_step = False
        self.first_failed = 0
        """The host whose torchrun failed first."""
        self._must_end_at = time.monotonic() + patience
        self._training_since: float | None = None
        self._has_failed = self._stop_requested = False

    def until_all_have_ended(self, directory: Path, on_progress: Callable[[int], None]) -> None:
        """Wait; `directory` is where the run writes."""
        written = _size(directory / "metrics.jsonl")  # by an earlier stage
        while any(process.poll() is None for process in self.processes):
            time.sleep(POLL_SECONDS)
            if self._training_since is not None:
                self._while_training(time.monotonic() - self._training_since, step := step_of(directory))
                on_progress(step)
            elif _size(directory / "metrics.jsonl") > written:
                self._training_since, self._must_end_at = time.monotonic(), math.inf
            self._look_for_failure()
            if time.monotonic() > self._must_end_at:
                for host in self.hosts:
                    host.kill()
        self.events.end()

    def stops(self, directory: Path) -> bool:
        """Whether the run wrote a checkpoint and ended because its time was up."""
        summary = directory / "summary.json"
        return self._stop_requested and summary.exists() and json.loads(summary.read_text())["stopped"] == "signal"

    def _while_training(self, seconds: float, step: int) -> None:
        self.events.advance(seconds)
        if self._stop_requested:
            return
        self.came_to_its_last_step = self.last_step is not None and step >= self.last_step
        if self.came_to_its_last_step or (self.minutes is not None and seconds > 60 * self.minutes):
            self._stop_requested, self._must_end_at = True, time.monotonic() + self.patience
            for process in self.processes:
                process.send_signal(signal.SIGTERM)

    def _look_for_failure(self) -> None:
        failed = [number for number, process in enumerate(self.processes) if process.poll() not in (None, DONE)]
        if failed and not self._has_failed:
            self._has_failed, self.first_failed = True, failed[0]
            self._must_end_at = min(self._must_end_at, time.monotonic() + self.patience)


def _size(path: Path) -> int:
    """In bytes; 0 where there is nothing."""
    return path.stat().st_size if path.exists() else 0


def step_of(directory: Path) -> int:
    """The step of the last line of metrics.jsonl; 0 before there is one."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().split(b"\n")
    for line in reversed(lines[:-1]):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def _command(
    planned: TrialSpec, stage: Stage, hosts: Sequence[Host], number: int, processes: int, port: int, faults: Faults
) -> list[str]:
    """torchrun on one host."""
    nodes = ["--nnodes", str(len(hosts)), "--node-rank", str(number), "--nproc-per-node", str(processes)]
    master = ["--master-addr", hosts[0].address, "--master-port", str(port)]
    rank = [
        "-m",
        "llmtrain.compare.rank",
        faults.model_dump_json(),
        str(planned.recipe),
        *planned.overrides,
        *stage.overrides,
    ]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *master, *rank]


def _environment(host: Host, recipe: Recipe) -> dict[str, str]:
    """Virtual hosts have one CPU thread a rank, and no GPU: they would all share the same one."""
    own = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": host.interface,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(recipe.run.timeout_seconds)),
    }
    return {**os.environ, **own}


def _counters(host: Host, sent_before: int | None, received_before: int | None) -> dict[str, Any]:
    def since(now: int | None, before: int | None) -> int | None:
        return None if now is None or before is None else now - before

    return {
        "name": host.name,
        "address": host.address,
        "sent": since(host.sent(), sent_before),
        "received": since(host.received(), received_before),
    }


def _last_lines(log: Path) -> list[str]:
    """What the ranks said last, without torchrun's account of it."""
    lines = log.read_text(errors="replace").splitlines()
    said = list(itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
    return (said or lines)[-LAST_LINES:]


def _commit() -> str | None:
    """Of the code that runs, where it is a git checkout."""
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
