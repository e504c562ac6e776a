"""Tokenizing in the background of training: one low-priority process per host, or per folder that several hosts share,
and its supervisor in a host's first rank.

The process is `python -m llmtrain.data.background`. It holds the folder's lock and commits each block when it is complete.
Its standard input is a pipe whose other end the rank holds, so it notices when the rank ends, even if the rank is killed.
It then commits the tokens that it has made, and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from llmtrain.config import DataSection
from llmtrain.data.dataset import read_index
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.data.stream import STATUS, text_error, write_status
from llmtrain.errors import BAD_USAGE, STOPPED_EARLY, DataError, exit_with_status, one_line
from llmtrain.parallel.world import environment_without_rank
from llmtrain.waiting import announced

COMMAND = (sys.executable, "-m", "llmtrain.data.background")
NICENESS = 10
"""Increment of the process's niceness, so that it gets only the CPU time that training leaves."""
ATTEMPTS = 3
"""Number of failures in a row after which an error in the text ends the run. A process that added tokens before it
failed counts as the first."""
PAUSES = (0.0, 5.0, 30.0, 60.0, 300.0)
"""Seconds from a failure to the next start, by the number of failures in a row. The last one repeats."""
END_SECONDS = 60.0
"""Maximum seconds that the process may take to commit its tokens when the run ends."""
STATUS_SECONDS = 1.0
"""Minimum seconds between two updates of the status."""


class BackgroundTokenizer:
    """Supervisor of a host's tokenizing process. Use it as a context manager.

    A process that fails or is killed is started again. From the third failure in a row (ATTEMPTS), an error in the text
    ends the run with its error line. Any other failure may be temporary: it then ends only ranks that wait for more
    text, and only once no text has been added for `timeout_seconds`."""

    def __init__(self, data: DataSection, train_tokens: int, eval_tokens: int, timeout_seconds: float) -> None:
        self.directory, self._timeout = cache_path(data), timeout_seconds
        job = {"data": data.model_dump(mode="json"), "train_tokens": train_tokens, "eval_tokens": eval_tokens}
        self._job = json.dumps(job) + "\n"
        self.problem: DataError | None = None
        """Error that ends the run, or None."""
        self._process: subprocess.Popen[str] | None = None
        """Process that was started last."""
        self._over = threading.Event()
        """Set once the run has ended, after which no process is started."""
        self._lock = threading.Lock()
        """Lock on `_process` and `_over`, so that the exit ends every process that the supervising thread starts."""
        self._thread = threading.Thread(target=self._supervise, name="supervises the tokenizer", daemon=True)

    def __enter__(self) -> BackgroundTokenizer:
        with suppress(OSError):  # of an earlier run; the tokenizer reports a folder that can't be written
            (self.directory / STATUS).unlink(missing_ok=True)
        self._start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            process = self._process
        if process is None:
            return
        with suppress(OSError):
            process.stdin.close()
        with announced(f"the tokenizer of {self.directory} to keep what it has", END_SECONDS):
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join()

    def _start(self) -> None:
        """Start a process. It reads its job from the first line of its standard input. The end of that input tells it that
        the run has ended."""
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C must reach the run alone, because its last steps may need more text
            # tokenizing needs no GPU, but libraries would allocate some of its memory
            env={**environment_without_rank(), "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "true"},
        )
        with suppress(OSError):  # the process has already ended, which the supervising thread finds out
            self._process.stdin.write(self._job)
            self._process.stdin.flush()

    def _supervise(self) -> None:
        """Wait for the process, and start it again or report its error, until it or the run has ended."""
        failures, tokens_before, last_progress = 0, self._count_tokens(), time.monotonic()
        while True:
            process = self._process
            lines = deque((line.strip() for line in process.stderr), maxlen=20)
            code = process.wait()
            if self._over.is_set() or code == 0:
                return
            if (tokens := self._count_tokens()) != tokens_before:
                failures, tokens_before, last_progress = 0, tokens, time.monotonic()
            failures += 1
            error, pause = self._explain(code, list(lines)), PAUSES[min(failures, len(PAUSES)) - 1]
            if failures >= ATTEMPTS and code == BAD_USAGE:
                self._give_up(f"{error} (attempt {failures} without new text)", is_temporary=False)
                return
            if failures >= ATTEMPTS and time.monotonic() - last_progress > self._timeout:
                self._end_waits(
                    f"{error} (no new text for {self._timeout:g} s, run.timeout_seconds)", is_temporary=True
                )
            when = f" in {pause:g} s" if pause else ""
            print(f"{error}; the tokenizer is started again{when}", file=sys.stderr, flush=True)
            if self._over.wait(pause):
                return
            with self._lock:
                if self._over.is_set():
                    return
                try:
                    self._start()
                except OSError as no_process:
                    self._give_up(f"{error}; it can't be started again ({one_line(no_process)})", is_temporary=True)
                    return

    def _give_up(self, problem: str, is_temporary: bool) -> None:
        """Keep the error, which ends all ranks."""
        self.problem = text_error(problem, is_temporary)
        self._end_waits(problem, is_temporary)

    def _end_waits(self, problem: str, is_temporary: bool) -> None:
        """Write the error for the ranks that wait for text."""
        with suppress(OSError):  # the disk may be full; waiting ranks then time out, because no text is added
            write_status(self.directory, error=problem, is_temporary=is_temporary)

    def _count_tokens(self) -> int:
        """Return the number of tokens in the folder's index; -1 if it can't be read."""
        with suppress(DataError):
            return sum(split.tokens for split in read_index(self.directory).splits.values())
        return -1

    def _explain(self, code: int, lines: list[str]) -> str:
        """Return one line that says why the process has ended."""
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if errors:
            return errors[-1]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        why = f" ({lines[-1]})" if lines and code > 0 else ""
        return f"the tokenizer of {self.directory} {how}{why}"


class RunEnded(BaseException):
    """End of the run that this process tokenizes for. Not an Exception, so that no library swallows it."""


def main() -> None:
    """Tokenize the text that the first line of standard input describes, until there are enough tokens or the input ends."""
    os.nice(NICENESS)
    job = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm's signal is for the ranks, which then end this process
    threading.Thread(target=_watch_input, daemon=True).start()
    data = DataSection(**job["data"])
    try:
        prepare(data, job["train_tokens"], job["eval_tokens"], on_progress=_StatusWriter(cache_path(data)))
    except RunEnded:
        sys.exit(STOPPED_EARLY)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise RunEnded


def _watch_input() -> None:
    """Interrupt the main thread when the run ends. Kill the process if it still exists END_SECONDS later."""
    while os.read(0, 1 << 10):  # not sys.stdin: an interpreter that shuts down while this thread holds its lock aborts
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


class _StatusWriter:
    """Callback that tells waiting ranks the number of training tokens, and of documents skipped on the way to new text, at most once
    per STATUS_SECONDS."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written_at = 0.0

    def __call__(self, tokens: int, skipped: int) -> None:
        if time.monotonic() - self._written_at >= STATUS_SECONDS:
            self._written_at = time.monotonic()
            write_status(self._directory, tokens=tokens, **({"skipped": skipped} if skipped else {}))


if __name__ == "__main__":
    exit_with_status(main)
