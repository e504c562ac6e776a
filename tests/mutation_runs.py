"""Test runs on mutated copies of the tree, each in a fork of a process that has already imported torch and the other libraries.

The forking process does not import llmtrain, and a fork forgets the modules of `tests`, so it imports both from its copy.
"""

from __future__ import annotations

import compileall
import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from py_compile import PycInvalidationMode

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = (
    *("llmtrain.train.run", "llmtrain.export.export", "llmtrain.doctor.run_checks"),
    *("llmtrain.eval.command", "llmtrain.compare.runner", "llmtrain.compare.report", "llmtrain.plan.show"),
    *("llmtrain.launch.torchrun", "llmtrain.cli", "deepspeed", "torch.utils.tensorboard"),
)
"""Modules that a separate process imports once, to find out which libraries the tests need."""
OURS = ("llmtrain", "tests")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.05
NO_BUDGET = ("--cpu-limit-test=1e9", "--cpu-limit-all=1e9")

ends_in_order = threading.Event()
"""Set in the mother (tests/mother.py) and its forks: SystemExit ends them like an interpreter, and not by `os._exit`."""


@dataclass(frozen=True)
class Run:
    """A run of pytest: the tests, and the time limits."""

    tests: tuple[str, ...]
    marks: str | None = None
    """Expression for `-m`. None stands for the one in pyproject.toml."""
    stops_at_first: bool = True
    left_out: tuple[str, ...] = ()
    """Files and node ids to ignore or deselect."""
    limit: float = 1800.0
    """Seconds after which the whole run is killed."""
    limit_of_test: float = 300.0


@dataclass
class Outcome:
    """Outcome of a run."""

    code: int | None = None
    """pytest's exit code, or None if pytest was killed at the limit or died."""
    failed: list[str] = field(default_factory=list)
    """Node ids of failed tests and of files that failed to import, in order."""
    message: str = ""
    """First line of the error in the first failure's traceback, which pytest marks with `E`."""
    count: int = 0
    """Number of tests that ran."""
    longest: float = 0.0
    """Seconds that the slowest test took."""
    seconds: float = 0.0
    timed_out: bool = False


class Watcher:
    """A pytest plugin that records failures and the durations of tests."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._began: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.outcome.count += 1
        self.outcome.longest = max(self.outcome.longest, time.monotonic() - self._began[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self.outcome.failed:
            self.outcome.failed.append(report.nodeid)
            lines = [line.strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.outcome.message = self.outcome.message or (lines[0][:200] if lines else "")


class Slot:
    """A copy of the tree, for one run at a time."""

    def __init__(self, folder: Path):
        """Copy the files that git tracks or would add. Link `../shared` beside the copy."""
        self.folder, self.tree = folder, folder / "tree"
        shutil.rmtree(folder, ignore_errors=True)
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listing.stdout.split("\0")):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():  # llmtrain/recipes is a link to a folder
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)
        if (ROOT.parent / "shared").is_dir():
            (folder / "shared").symlink_to(ROOT.parent / "shared")
        # Bytecode is validated by content, because a mutant may leave the time (in seconds) and the size of a file unchanged.
        compileall.compile_dir(self.tree, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        if (ROOT / ".venv").is_dir():
            (self.tree / ".venv").symlink_to(ROOT / ".venv")  # where launch/train.sh looks for an interpreter
        self._keeper: int | None = None
        self._broken: tuple[Path, str] | None = None

    @property
    def is_free(self) -> bool:
        """True if no run is in progress."""
        return self._keeper is None

    def start(self, run: Run, change: tuple[str, str, str] | None) -> None:
        """Start a run on the tree with a change (file, old, new), or on the unchanged tree."""
        assert self.is_free
        if change is not None:
            file, old, new = change
            path = self.tree / file
            text = path.read_text()
            assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
            self._broken = path, text
            path.write_text(text.replace(old, new))
        (self.folder / "outcome.json").unlink(missing_ok=True)
        self._began = time.monotonic()
        self._keeper = _fork(lambda: _keep(self.folder, run))

    def ended(self) -> Outcome | None:
        """Return the outcome of the run, or None while it is in progress."""
        assert self._keeper is not None
        if os.waitpid(self._keeper, os.WNOHANG) == (0, 0):
            return None
        return self._over()

    def stop(self) -> None:
        """Kill the run in progress, if any."""
        if self._keeper is not None:
            os.kill(self._keeper, signal.SIGTERM)
            os.waitpid(self._keeper, 0)
            self._over()

    def _over(self) -> Outcome:
        self._keeper = None
        if self._broken is not None:
            path, text = self._broken
            path.write_text(text)
            self._broken = None
        seconds = round(time.monotonic() - self._began, 1)
        try:
            return Outcome(**json.loads((self.folder / "outcome.json").read_text()) | {"seconds": seconds})
        except FileNotFoundError:
            return Outcome(seconds=seconds)


def preload() -> None:
    """Import into this process all libraries that llmtrain imports, but no module of llmtrain."""
    os.environ.update(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", KINETO_LOG_LEVEL="99",
        CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1",
        JE_ARROW_MALLOC_CONF="background_thread:false",  # pyarrow's allocator would start a thread
    )  # fmt: skip
    sys.dont_write_bytecode = True
    program = f"import sys\nfor name in {PRELOAD}: __import__(name)\nprint('\\n'.join(sys.modules))"
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in told.stdout.split():
        if name.partition(".")[0] not in OURS:
            try:
                importlib.import_module(name)
            except Exception:  # created during the import of another module, or for import by that module alone
                continue
    assert not any(name.partition(".")[0] == "llmtrain" for name in sys.modules)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads can't be forked safely"


def _fork(body: Callable[[], object]) -> int:
    """Call `body` in a fork of this process, which ends when `body` returns. Return the process id of the fork."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except SystemExit:
            if ends_in_order.is_set():
                raise
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def _keep(folder: Path, run: Run) -> None:
    """Run the tests in a child process, end them at the time limit, and leave no process behind."""
    os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    def end(number: int, frame: object) -> None:
        _kill_descendants()
        os._exit(1)

    tester = _fork(lambda: _test(folder, run))
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deadline, is_over = time.monotonic() + run.limit, False
    while not is_over and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        is_over = os.waitpid(tester, os.WNOHANG) != (0, 0)
    if not is_over:
        (folder / "outcome.json").write_text(json.dumps(asdict(Outcome(timed_out=True))))
    _kill_descendants()


def _kill_descendants() -> None:
    """Kill descendants until none is left, because a process may start another while it is being killed."""
    while below := [
        process for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE
    ]:
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(below, timeout=1.0)


def _test(folder: Path, run: Run) -> None:
    tree = folder / "tree"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    sys.argv[:] = ["pytest"]
    os.environ.update(PYTHONPATH=str(tree), TMPDIR=str(folder / "tmp"))
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    (folder / "tmp").mkdir()
    import tempfile

    tempfile.tempdir = None
    import llmtrain

    assert Path(llmtrain.__file__).is_relative_to(tree), llmtrain.__file__
    if any(_forks(tree / test.partition("::")[0]) for test in run.tests):
        _start_mother(folder)
    watcher = Watcher()
    watcher.outcome.code = int(pytest.main(_arguments(run), plugins=[watcher]))
    (folder / "outcome.json").write_text(json.dumps(asdict(watcher.outcome)))


def _forks(tests: Path) -> bool:
    """Return whether tests need the mother of processes, judged by words in their file. A folder always does."""
    return tests.is_dir() or any(word in tests.read_text() for word in ("mother", "ranks", "RankPool", "Runs"))


def _start_mother(folder: Path) -> None:
    """Fork the session's mother of processes from this process, which has already imported the libraries."""
    from tests import mother

    address, owner = folder / "mother" / "socket", os.getpid()
    shutil.rmtree(address.parent, ignore_errors=True)
    address.parent.mkdir()
    os.environ[mother.ADDRESS] = str(address)

    def serve() -> None:
        ends_in_order.set()
        mother.serve(str(address), owner)
        sys.exit()

    _fork(serve)


def _arguments(run: Run) -> Sequence[str]:
    files = [f"--ignore={name}" for name in run.left_out if "::" not in name]
    return [
        *(name for name in run.tests),
        *(
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            *NO_BUDGET,
            f"--timeout={run.limit_of_test:.0f}",
        ),
        *(["-n", "0"] if importlib.util.find_spec("xdist") else []),
        *(["-x"] if run.stops_at_first else []),
        *(["-m", run.marks] if run.marks else []),
        *files,
        *(f"--deselect={name}" for name in run.left_out if "::" in name),
    ]
