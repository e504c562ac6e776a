"""Runs of a tiny recipe from the command line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from llmtrain.run_files import complete_checkpoints
from tests.end_to_end import held_rank
from tests.mother import ROOT, Mother, Process, run_llmtrain, session

RECIPE = "recipes/edit_llama_stdlib.yaml"
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
SHORT = [
    *("train.steps=12", "train.micro_batch=4", "checkpoint.every=3", "log.every=1", "log.tensorboard=false"),
    *("eval.every=null", "eval.tokens=320", "eval.sample_prompt=null"),
]
"""Overrides for two synchronous steps, two rounds of four steps and a round of two, with validation only before and
after training."""
TOKENS_A_STEP = 16 * 32
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
TEXT_CHARACTERS = 40_000
RUN_SECONDS = 200
"""Timeout of a run on a busy machine."""


class Runs:
    """Runs of a tiny recipe in one scratch folder from pytest's tmp_path_factory, with `changes` to the environment.
    All tests of the session share the text, its tokens and the reference runs."""

    def __init__(self, folder: Path, changes: Mapping[str, str] | None = None, shared: Path | None = None):
        self.folder, self.environment = folder, environment() | dict(changes or {})
        self._mother = Mother(changes) if changes else session()
        self._started: list[Process | subprocess.Popen] = []
        of_all_workers = folder.parents[1] if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
        self.shared = shared or of_all_workers / "shared"

    def command(self, name: str, *overrides: str) -> list[str]:
        text, folder = write_text(self.shared), self.folder
        keys = [f"run.name={name}", f"run.out_dir={folder / 'runs'}", f"data.cache_dir={self.shared / 'data'}"]
        keys += [f"data.source={text}", "data.tokenizer=train:400", "data.validation_fraction=0.2"]
        return ["bash", "launch/train.sh", RECIPE, *TINY, *SHORT, *keys, *overrides]

    def start(self, command: list[str], fresh: bool = False) -> Process | subprocess.Popen:
        """Start a command in its own session. With `fresh`, use a new interpreter instead of a fork of the mother."""
        self._started.append(start(command, self.environment, fresh, self._mother))
        return self._started[-1]

    def start_held(self, name: str, step: int, *overrides: str) -> Process:
        """Start a run, and return once its rank 1 has trained `step`. The rank then waits for a signal, or to be killed."""
        process = self._mother.fork(*self.held(name, step, *overrides), environment=self.environment, capture=True)
        self._started.append(process)
        self.wait_until_held(name, process)
        return process

    def held(self, name: str, step: int, *overrides: str) -> tuple[Any, ...]:
        """Return a function and its arguments, which start a run whose rank 1 waits after `step`."""
        return held_rank.launch, step, str(self.hold_file(name)), *self.command(name, *overrides)[2:]

    def hold_file(self, name: str) -> Path:
        """Return the file that exists once rank 1 of a run waits."""
        return self.folder / f"{name}-waits"

    def wait_until_held(self, name: str, launcher: Process) -> None:
        """Wait until rank 1 of a run waits. Fail if the launcher ends first."""
        file = self.hold_file(name)
        wait_until(lambda: file.exists() or launcher.poll() is not None, f"rank 1 of {name} has not reached its step")
        assert file.exists(), launcher.communicate(timeout=RUN_SECONDS)[0]

    def run(self, name: str, *overrides: str, fresh: bool = False) -> tuple[int, str]:
        """Run launch/train.sh, and return the exit code and the output."""
        return self.end(self.start(self.command(name, *overrides), fresh))

    def train(self, name: str, *overrides: str) -> tuple[int, str]:
        """Run `llmtrain train` in one process, without a launcher, and return the exit code and the output."""
        alone = ("parallel.replicas=1", "parallel.shards=1", *overrides)
        return self.end(self.start([sys.executable, "-m", "llmtrain", "train", *self.command(name, *alone)[2:]]))

    def end(self, process: Process | subprocess.Popen) -> tuple[int, str]:
        """Wait for a process, and return its exit code and its output."""
        output, _ = process.communicate(timeout=RUN_SECONDS)
        return process.returncode, output

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def lines(self, name: str) -> list[dict]:
        return lines_of(self.path(name))

    def exact(self, name: str) -> list[dict]:
        """Return the parts of a run's metrics lines that must equal those of another run to the last bit."""
        return [exact(line) for line in self.lines(name)]

    def reference(self, replicas: int = 2, shard: int = 2, *overrides: str) -> Path:
        """Return the folder of an undisturbed run on this mesh. It is trained once per session, and must only be read."""
        keys = (f"parallel.replicas={replicas}", f"parallel.shards={shard}", *overrides)
        name = f"{replicas}x{shard}-{hashlib.sha256(' '.join(overrides).encode()).hexdigest()[:8]}"
        references = Runs(self.shared / "references", shared=self.shared)
        references.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(references.folder / f"{name}.lock"):
            if not (references.path(name) / "summary.json").exists():
                code, output = references.run(name, *keys)
                assert code == 0, output
        return references.path(name)

    def wait_for(self, name: str, step: int) -> None:
        """Wait for a complete checkpoint of `step`, or of a later step, because a run deletes old checkpoints."""
        folder = self.path(name) / "checkpoints"
        wait_until(lambda: max(complete_checkpoints(folder), default=-1) >= step, f"no checkpoint of step {step}")

    def kill(self) -> None:
        """Kill the processes that were started here and still run, with all their descendants."""
        for launcher in self._started:
            if launcher.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    for process in family_of(launcher):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                launcher.wait(RUN_SECONDS)
        self._started.clear()


def start(
    command: list[str], environment: Mapping[str, str], fresh: bool = False, mother: Mother | None = None
) -> Process | subprocess.Popen:
    """Start a command in the repository. A command of llmtrain is forked from the mother, unless `fresh` is set."""
    arguments = None if fresh else llmtrain_arguments(command)
    if arguments is not None:
        return (mother or session()).fork(run_llmtrain, *arguments, environment=environment, capture=True)
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def llmtrain_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments that a command passes to `llmtrain`; None if it starts another program."""
    for prefix, arguments in (
        (["bash", "launch/train.sh"], ["launch"]),
        ([sys.executable, "-m", "llmtrain"], []),
    ):
        if list(command[: len(prefix)]) == prefix:
            return [*arguments, *command[len(prefix) :]]
    return None


def environment() -> dict[str, str]:
    """Return this process's environment, with the tests' interpreter first in PATH and one OpenMP thread."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1"}


def write_text(folder: Path) -> Path:
    """Return a file of 40 KB of the standard library's Python code, written once per session. It has enough documents
    that some are held out for validation, whatever their text."""
    path = folder / "text.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        library = Path(sysconfig.get_path("stdlib"))
        sources = "\n\n\n".join(
            (library / f"{name}.py").read_text() for name in ("heapq", "textwrap", "shlex", "queue")
        )
        partial = folder / f"text-{os.getpid()}"
        partial.write_text(sources[:TEXT_CHARACTERS].replace("\n\n", "\n<|endoftext|>\n\n"))
        with contextlib.suppress(FileExistsError):  # another worker was first
            os.link(partial, path)
        partial.unlink()
    return path


def forget_after(path: Path, step: int) -> None:
    """Make a run look as if it had been killed after its checkpoint of `step`."""
    for checkpoint in (path / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    (path / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
    (path / "summary.json").unlink()


def lines_of(run: Path) -> list[dict]:
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def exact(line: dict) -> dict:
    """Return the part of a metrics line that must equal that of another run to the last bit."""
    return {key: line[key] for key in EXACT if key in line}


def exact_lines(run: Path) -> list[dict]:
    """Return the parts of a run's metrics lines that must equal those of another run to the last bit."""
    return [exact(line) for line in lines_of(run)]


def losses(run: Path) -> list[float]:
    """Return a run's training losses, in the order of steps."""
    return [line["train/loss"] for line in lines_of(run) if "train/loss" in line]


def summary(run: Path) -> dict:
    """Return the contents of a run's summary.json."""
    return json.loads((run / "summary.json").read_text())


def ranks_of(launcher: Process | subprocess.Popen) -> list[psutil.Process]:
    """Return the living ranks that a launcher's rank server has forked, in the order of their numbers."""
    try:
        below = psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    named = {}
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            program, _, number = process.name().partition("-")
            if program == "llmtrain" and number.isdigit() and process.status() != psutil.STATUS_ZOMBIE:
                named[int(number)] = process
    return [named[number] for number in sorted(named)]


def family_of(launcher: Process | subprocess.Popen) -> list[psutil.Process]:
    """Return a launcher and all its descendants."""
    process = psutil.Process(launcher.pid)
    return [process, *process.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    """Return whether a process has ended. A zombie counts as ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float = 120.0) -> None:
    """Wait for a condition. Fail with the message `otherwise` if it does not hold within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise} after {seconds:g} s"
        time.sleep(0.02)
