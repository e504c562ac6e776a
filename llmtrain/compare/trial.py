"""Execution of one trial: a recipe trained on the hosts of a cluster under a condition."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.compare.cluster.hosts import Host
from llmtrain.compare.cluster.processes import CommandError
from llmtrain.compare.comparison import RUN_AGAIN, TRIAL, Comparison, ConditionSection, Stage, TrialSpec
from llmtrain.compare.faults import Faults
from llmtrain.compare.other_load import cpu_seconds, other_load
from llmtrain.compare.results import TrialRecord, TrialState
from llmtrain.config import Recipe
from llmtrain.errors import DONE, ResultsError, one_line
from llmtrain.files import atomic_write, read_mapping
from llmtrain.parallel.world import environment_without_rank
from llmtrain.run_files import METRICS, SUMMARY

POLL_SECONDS = 0.2
START_SECONDS = 300.0
"""Seconds, in addition to the recipe's own timeout, for ranks to log their first line, and to end after a failure or a
request to stop."""
LAST_LINES = 20
REPORT = re.compile(
    r'^Traceback \(most recent call last\):\n(?: .*\n)*? +File ".*torch/distributed/run\.py", ', re.MULTILINE
)
"""Beginning of torchrun's report on a failure or a signal, with which it ends."""


ERROR = ("error: ", "Traceback ")
"""Beginnings of the line of a rank's log that says why the rank failed."""


class StageEnd(NamedTuple):
    """Outcome of a stage on all of its hosts."""

    state: TrialState | None
    """None if the next stage continues the run, which is never the case after the last one."""
    exit_codes: list[int | None]
    last_lines: list[str]
    """Last lines of output of the first host that failed and logged an error."""
    seconds: float
    """Seconds of training."""


@dataclass
class StageTimes:
    """Times of a stage's events, in seconds of the monotonic clock; None for an event that has not happened."""

    started: float
    began: float | None = None
    """When a step of the stage was first logged."""
    stopped: float | None = None
    """When the ranks were asked to stop."""
    stopped_after: int = 0
    """Last step that had been logged when the ranks were asked to stop."""
    failed: float | None = None
    """When the first host failed."""
    first_failed: int = 0
    """Number of that host, if one failed while others trained."""

    def waiting_since(self) -> float:
        """Return the time since which hosts have been expected to log a first line or to end; infinity while they train."""
        first_line = self.started if self.began is None else None
        return min(moment for moment in (first_line, self.stopped, self.failed, math.inf) if moment is not None)


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
        """Train until all hosts have ended, and write and return the record. A run that fails raises no error. Raises ResultsError if
        the folder or the record can't be written."""
        planned = self.planned
        with _writing(planned.directory):
            if planned.directory.exists():  # of an interrupted trial, whose times can't be continued
                shutil.rmtree(planned.directory)
            planned.directory.mkdir(parents=True)
        before = [_counters(host) for host in self.hosts]
        started, trained, cpu = time.monotonic(), 0.0, cpu_seconds()
        for stage in planned.stages:
            end = self._run_stage(stage, trained)
            trained += end.seconds
            if end.state is not None:
                break
        record = TrialRecord(
            condition=planned.condition,
            run=planned.run,
            seed=planned.seed,
            state=end.state,
            exit_codes=end.exit_codes,
            wall_seconds=round(time.monotonic() - started, 2),
            recipe=os.path.relpath(planned.recipe),
            overrides=list(planned.overrides),
            global_batch=self.recipe.train.global_batch,
            stages=planned.changes(),
            condition_in_words=self.words,
            commit=_commit(),
            hosts=[_traffic(host, counters) for host, counters in zip(self.hosts, before, strict=True)],
            last_lines=end.last_lines,
            other_load=other_load(cpu),
            missed=self.comparison.conditions[planned.condition].faults_after(trained),
        )
        path = planned.directory / TRIAL
        with _writing(path):
            atomic_write(path, record.model_dump_json(indent=2) + "\n")
        return record

    def _run_stage(self, stage: Stage, trained: float) -> StageEnd:
        """Run a stage on the first hosts. `trained` is the number of training seconds of the earlier stages."""
        hosts, condition = self.hosts[: stage.replicas], self.comparison.conditions[self.planned.condition]
        faults = Faults(seed=self.planned.seed, hosts=len(hosts), delays=condition.delays, garbage=condition.garbage)
        earlier = last_logged_step(self.planned.directory / METRICS)
        logged = [log.stat().st_size if log.exists() else 0 for log in map(self._log, hosts)]
        processes = [self._start(host, number, stage, faults) for number, host in enumerate(hosts)]
        times, failures = StageTimes(started=time.monotonic()), []
        try:
            self._watch(processes, stage, earlier, trained, times)
        except (TimeoutError, CommandError) as error:
            failures.append(one_line(error))
        seconds = 0.0 if times.began is None else time.monotonic() - times.began
        ends = [self.hosts[pause.host].resume for pause in condition.pauses]
        for end in [host.kill for host in hosts] if failures else ends:
            try:
                end()
            except (TimeoutError, CommandError) as error:
                failures.append(one_line(error))
        codes = [process.poll() for process in processes]
        if failures:
            return StageEnd(TrialState.FAILED, codes, failures, seconds)
        return self._end_of(stage, codes, times, seconds, logged)

    def _watch(
        self, processes: Sequence[subprocess.Popen], stage: Stage, earlier: int, trained: float, times: StageTimes
    ) -> None:
        """Wait until the processes have ended, and note the moments of the stage in `times`. Start the condition's events, stop the
        run after the stage's last step or at the time limit, and kill hosts that hang. Raises TimeoutError or CommandError if the
        processes of a host do not obey.

        Training has begun when a step after `earlier` is logged. Hosts have `patience` seconds to log it, and to end after the
        first failure or the request to stop.
        """
        metrics = self.planned.directory / METRICS
        events = host_events(self.comparison.conditions[self.planned.condition], self.hosts)
        patience = self.recipe.run.timeout_seconds + START_SECONDS
        time_limit, last_step = 60 * (self.comparison.stop_after_minutes or math.inf) - trained, stage.until or math.inf
        while any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)
            now, step = time.monotonic(), last_logged_step(metrics)
            if times.began is not None:
                while events and events[0][0] <= now - times.began:
                    events.pop(0)[1]()
                if times.stopped is None and (step >= last_step or now - times.began > time_limit):
                    times.stopped, times.stopped_after = now, step
                    for process in processes:
                        process.send_signal(signal.SIGTERM)
                self.on_progress(step)
            elif step > earlier:
                times.began = now
            failed = [number for number, process in enumerate(processes) if process.poll() not in (None, DONE)]
            if failed and times.failed is None:
                times.failed, times.first_failed = now, failed[0]
            if now > times.waiting_since() + patience:
                for host in self.hosts[: stage.replicas]:
                    host.kill()

    def _end_of(
        self, stage: Stage, codes: list[int | None], times: StageTimes, seconds: float, logged: Sequence[int]
    ) -> StageEnd:
        """Return the outcome of a stage whose processes have ended. `logged` is the size of each host's log when it began."""
        if all(code == DONE for code in codes):
            if stage.until is None:
                return StageEnd(TrialState.DONE, codes, [], seconds)
            reason = f"the run ended before it was stopped for its restart after step {stage.until}; train more steps"
            return StageEnd(TrialState.FAILED, codes, [reason], seconds)
        directory = self.planned.directory
        if times.stopped is not None and read_mapping(directory / SUMMARY, RUN_AGAIN).get("stopped") == "signal":
            is_complete = times.stopped_after >= (stage.until or math.inf)
            return StageEnd(None if is_complete else TrialState.STOPPED, codes, [], seconds)
        return StageEnd(TrialState.FAILED, codes, self._reason(codes, times.first_failed, logged), seconds)

    def _reason(self, codes: list[int | None], first: int, logged: Sequence[int]) -> list[str]:
        """Return the last lines that the ranks of host `first` logged in this stage or, if it failed without an error of its own,
        those of the first host that logged one; torchrun's lines if its ranks logged nothing. A host that was stopped, or that does
        not repeat the error of another host, fails without one."""
        others = (number for number, code in enumerate(codes) if code != DONE and number != first)
        failed = [first, *others] if codes[first] != DONE else [*others]
        logs = [
            self._log(self.hosts[number]).read_bytes()[logged[number] :].decode(errors="replace") for number in failed
        ]
        lines = next((own for own in map(_own_lines, logs) if any(line.startswith(ERROR) for line in own)), None)
        return (lines or _own_lines(logs[0]) or logs[0].splitlines())[-LAST_LINES:]

    def _log(self, host: Host) -> Path:
        """Return the path of a host's log, which all stages append to."""
        return self.planned.directory / f"{host.name}.log"

    def _start(self, host: Host, number: int, stage: Stage, faults: Faults) -> subprocess.Popen:
        """Start torchrun on a host: one CPU thread per rank, and no GPU, because all hosts would share the same one."""
        ranks = self.comparison.hosts.processes
        nodes = ["--nnodes", stage.replicas, "--node-rank", number, "--nproc-per-node", ranks]
        master = ["--master-addr", self.hosts[0].address, "--master-port", self.port]
        master += ["--log-dir", os.devnull]
        rank = ["-m", "llmtrain.compare.faults", faults.model_dump_json()]
        recipe = [self.planned.recipe, *self.planned.overrides_of(stage)]
        command = [sys.executable, "-m", "torch.distributed.run", *nodes, *master, *rank, *recipe]
        env = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": host.interface,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.recipe.run.timeout_seconds)),
        }
        path = self._log(host)
        with _writing(path):
            log = path.open("a", encoding="utf-8")
        with log:
            return host.popen(
                list(map(str, command)), env=environment_without_rank() | env, stdout=log, stderr=subprocess.STDOUT
            )


def host_events(condition: ConditionSection, hosts: Sequence[Host]) -> list[tuple[float, Callable[[], None]]]:
    """Return (seconds after training began, action) for each pause, its end and each death, in order of time."""
    pauses = [(pause.at, hosts[pause.host].pause) for pause in condition.pauses]
    resumes = [(pause.at + pause.seconds, hosts[pause.host].resume) for pause in condition.pauses]
    kills = [(kill.at, hosts[kill.host].kill) for kill in condition.kills]
    return sorted(pauses + resumes + kills, key=lambda event: event[0])


def last_logged_step(metrics: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, or -1 if it has none."""
    if metrics.exists():
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 8192))
            *lines, _ = file.read().split(b"\n")
        for line in reversed(lines):
            with suppress(ValueError):
                return int(json.loads(line)["step"])
    return -1


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a ResultsError that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise ResultsError(
            f"{path} can't be written ({one_line(error)}); make room, and start the same command again, which repeats this trial"
        ) from error


def _counters(host: Host) -> tuple[int, int] | None:
    """Return the bytes that a host has sent and received; None if they are not counted, or can't be read."""
    with suppress(CommandError):
        sent, received = host.sent(), host.received()
        return None if sent is None or received is None else (sent, received)
    return None


def _traffic(host: Host, before: tuple[int, int] | None) -> dict[str, Any]:
    """Return a host's name, address, and the bytes that it sent and received since its counters had the values `before`."""
    now = before and _counters(host)
    counts = {"sent": now[0] - before[0], "received": now[1] - before[1]} if now else {}
    return {"name": host.name, "address": host.address, **counts}


def _own_lines(text: str) -> list[str]:
    """Return the lines of a log that the ranks wrote, without those of torchrun."""
    return [line for line in REPORT.split(text)[0].splitlines() if "torch/distributed/elastic" not in line]


def _commit() -> str | None:
    """Return the commit of the code that runs, or None if it is not in a git checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        folder = Path(__file__).parent
        return subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, encoding="utf-8", errors="replace", timeout=10
        ).strip()
    return None
