"""Background evaluation: `llmtrain eval` on checkpoints, in a separate process, while training continues.

Training never waits for an evaluation, except for the last one at the end of the run. One evaluation runs at a
time. Of the checkpoints completed during an evaluation, only the newest is evaluated next. A failed evaluation
prints one console line and never fails the run.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from llmtrain.config import Recipe, SuiteSection
from llmtrain.parallel.world import environment_without_rank
from llmtrain.run_files import EVALUATIONS, complete_checkpoints, step_name
from llmtrain.stop_signals import STOP_SIGNALS
from llmtrain.threads import LatestStepWorker
from llmtrain.train.loggers import Console
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.signals import RUN, StopRequest

GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL for an evaluation that is terminated."""
POLL_SECONDS = 0.2
"""Interval at which the wait for the last evaluation checks for a stop request."""


def start_in_background(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen:
    """Start a process at the lowest priority, with its output in `log`, and in its own session, so that Ctrl-C reaches only the
    run. Raises OSError if it can't be started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    return process


class BackgroundEval:
    """Background evaluations of one run. Does nothing if `section` is None, that is, without `eval.suite`
    and on every rank except the main rank.

    A context manager. If the run is complete, its exit waits for the evaluation of the last checkpoint. After a stop or
    an error, its exit terminates the running evaluation.
    """

    def __init__(
        self,
        section: SuiteSection | None,
        recipe: Recipe,
        directory: RunDirectory,
        console: Console,
        stop: StopRequest,
    ):
        self.section, self.run, self.console, self.stop = section, directory.path, console, stop
        self.total_steps, self.checkpoint_every = recipe.train.total_steps, recipe.checkpoint.every
        self.newest = max(complete_checkpoints(directory.checkpoints), default=0)
        """Step of the newest checkpoint. Corrected by a run that continues from an earlier checkpoint because the
        newest one is damaged."""
        self.start = start_in_background
        self.worker = LatestStepWorker(self._evaluate, "evaluates checkpoints")
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._is_over = False
        """True once no evaluation may start. An evaluation that ends afterwards was terminated, and is not reported as
        failed."""

    def after_checkpoint(self, step: int) -> None:
        """Queue the checkpoint of `step`, which is complete on disk, if an evaluation is due. Returns immediately."""
        if not self._is_due(step):
            return
        running, replaced = self.worker.submit(step)
        if running is not None:
            instead = "" if replaced is None else f", instead of step {replaced}"
            self._say(step, f"waits for the evaluation of step {running}{instead}")

    def pending_steps(self) -> set[int]:
        """Return the steps of the checkpoints that are being evaluated or are queued. Thread-safe."""
        return self.worker.pending_steps()

    def __enter__(self) -> BackgroundEval:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.newest >= self.total_steps:
                self._wait()
        finally:
            self._end()

    def _is_due(self, step: int) -> bool:
        """Record `step` as the newest checkpoint. Return whether it has reached or passed a multiple of the evaluation period
        since the previous checkpoint, or the end of the run."""
        before, self.newest = self.newest, step
        if self.section is None:
            return False
        period = (self.checkpoint_every or self.total_steps) * self.section.every
        return step >= self.total_steps or step // period > before // period

    def _evaluate(self, step: int) -> None:
        log = self.run / EVALUATIONS / "log" / f"{self._name}-{step_name(step)}.log"
        command = [sys.executable, "-m", *self._command("--step", str(step), "--device", self.section.device)]
        try:
            with self._lock:
                if self._is_over or self.stop.requested:
                    return
                self._process = self.start(command, self._environment(), log)
        except OSError as error:
            self._say(step, f"the evaluation can't be started ({error})")
            return
        self._say(step, f"evaluating in the background ({log})")
        code = self._process.wait()
        if self._is_over:
            return
        if -code in STOP_SIGNALS:  # a scheduler sends them to all processes of a job, so the run is about to stop, too
            self._say_ended(step)
        else:
            self._report(step, code, log)

    def _report(self, step: int, code: int, log: Path) -> None:
        """Print one line: the scores, or the reason for the failure."""
        if code != 0:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            self._say(step, f"the evaluation failed ({how}): {last_log_line(log)}; see {log}")
            return
        result = self.run / EVALUATIONS / f"{self._name}-{step_name(step)}.json"
        try:
            scores = json.loads(result.read_text(encoding="utf-8"))["headline"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say(step, f"the evaluation left no result ({error}); see {log}")
            return
        self._say(step, scores or f"evaluated ({result})")

    def _wait(self) -> None:
        """Wait for the last evaluation until it ends, `wait_seconds` have passed, or a signal requests a stop."""
        if not self.worker.has_started:
            return
        if not self.worker.join():
            self.console.print(
                f"waiting for the evaluation of step {self.newest} on {self._name}, at most {self.section.wait_seconds:g} s "
                "(eval.suite.wait_seconds)"
            )
        until = time.monotonic() + self.section.wait_seconds
        while not self.stop.requested and time.monotonic() < until and not self.worker.join(POLL_SECONDS):
            pass
        if self.worker.join():
            self.console.print(f"all checkpoints: {shlex.join(self._command('--over-time'))}")

    def _end(self) -> None:
        """Terminate the running evaluation. Its finished parts stay in the evaluation cache."""
        with self._lock:
            self._is_over = True
            step, process = self.worker.running, self._process
        if step is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process is not None and process.poll() is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, number)
            self.worker.join(GRACE_SECONDS)
        self._say_ended(step)

    def _say_ended(self, step: int) -> None:
        self._say(step, f"the evaluation was terminated; to finish it, run {shlex.join(self._command('--over-time'))}")

    def _command(self, *arguments: str) -> list[str]:
        section = self.section
        options = ["--suite", section.name]
        options += [] if section.limit is None else ["--limit", str(section.limit)]
        options += [] if section.data_dir is None else ["--data-dir", section.data_dir]
        return ["llmtrain", "eval", str(self.run), *options, *arguments]

    def _environment(self) -> dict[str, str]:
        found = environment_without_rank()
        found["OMP_NUM_THREADS"] = str(self.section.threads)
        found[RUN] = str(os.getpid())
        if self.section.device == "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ""  # otherwise libraries would still take some of a GPU's memory
        return found

    def _say(self, step: int, text: str) -> None:
        self.console.print(f"step {step}/{self.total_steps} | {self._name}: {text}")

    @property
    def _name(self) -> str:
        """Return the prefix of the suite's result and log files."""
        return Path(self.section.name).stem if self.section.name.endswith((".yaml", ".yml")) else self.section.name


def last_log_line(log: Path) -> str:
    """Return the line of a log that best explains a failure, cut to 300 characters: the last `error:` line, or else the
    last line that is not a progress bar."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        lines = []
    lines = [line for line in lines if line and "%|" not in line]
    ours = [line for line in lines if line.startswith("error: ")]
    return (ours or lines or ["the log has no message"])[-1].removeprefix("error: ")[:300]
