"""Tests of waits that take longer than expected: one line says what they wait for, and for how long, and each wait ends."""

from __future__ import annotations

import errno
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from filelock import FileLock

from llmtrain import waiting
from llmtrain.data import hub, loader
from llmtrain.errors import DataError, RecipeError, TrainingError
from llmtrain.launch import node_rendezvous
from llmtrain.launch.node_info import NodeInfo
from llmtrain.launch.nodes import Nodes
from llmtrain.parallel import world
from llmtrain.sync.schedules.group_averager import GroupAverager
from llmtrain.train import run_dir
from llmtrain.waiting import acquire, announced


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce waits at once."""
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(loader, "QUIET_SECONDS", 0.01)


class PrintingTimer(threading.Timer):
    """A timer that is canceled only after it has run, though its thread may be late on a busy machine."""

    def cancel(self) -> None:
        assert self.finished.wait(60), "nothing was said"


@pytest.fixture
def surely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce every wait, however late the announcing thread is."""
    monkeypatch.setattr(threading, "Timer", PrintingTimer)


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Provide a function that waits until a line was printed. It stands for whatever the code under test waits for."""
    printed = threading.Event()

    def say(*words: object, **options: object) -> None:
        print(*words, **options)
        printed.set()

    for module in (waiting, loader):
        monkeypatch.setattr(module, "print", say, raising=False)

    def wait(*_: object, **__: object) -> None:
        assert printed.wait(20), "nothing was said"

    return wait


def test_a_slow_wait_is_announced_and_a_fast_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoken: Callable[[], None]
) -> None:
    with announced("a friend", 7):
        spoken()
    assert capsys.readouterr().err == "waiting for a friend (at most 7 s)\n"
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 60)
    with announced("a friend"):
        pass
    assert capsys.readouterr().err == ""
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


@pytest.mark.usefixtures("surely")
def test_a_process_in_the_run_directory_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_dir, "PATIENCE_SECONDS", 1)
    with FileLock(tmp_path / ".lock"), pytest.raises(RecipeError, match="another process works in"):
        run_dir.lock_folder(tmp_path, "choose another")
    assert capsys.readouterr().err == f"waiting for the process that works in {tmp_path} to end (at most 1 s)\n"


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_nobody_waits_for_a_lock_where_there_are_no_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process must not take the file that it creates itself for another process's lock."""
    waits: list[str] = []
    for number in (errno.ENOSYS, errno.ENOLCK):
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, "no locks")))
        for name in "ab":
            with acquire(tmp_path / f"{number}.lock", 0.01, lambda name=name: waits.append(name)):
                pass
        said = f"{tmp_path} has no file locks: let one process at a time write there\n"
        assert (waits, capsys.readouterr().err) == ([], 2 * said if number == errno.ENOLCK else "")
    run_dir.lock_folder(tmp_path, "choose another")
    assert capsys.readouterr().err == said, "the same holds for a run directory"


def test_the_hub_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoken: Callable[[], None]
) -> None:
    limits: list[float] = []

    def repo_info(self: object, name: str, repo_type: str, timeout: float) -> None:
        limits.append(timeout)
        spoken()
        raise TimeoutError("no answer")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", repo_info)
    with pytest.raises(
        DataError, match=r"'a/b' needs the Hugging Face hub, which can't be used from here \(no answer\)"
    ):
        hub.require_on_hub("a/b", "dataset", key="data.source", instead="a folder")
    assert capsys.readouterr().err.startswith("waiting for the Hugging Face hub's answer about a/b, 5 s for each")
    assert limits == [hub.TIMEOUT]


def test_slurms_controller_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoken: Callable[[], None]
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        spoken()
        return subprocess.CompletedProcess(command, 0, "a1\na2\n")

    monkeypatch.setattr(world.subprocess, "run", run)
    for name, value in {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert world.master_endpoint() == ("a1", "15003")
    assert capsys.readouterr().err == "waiting for Slurm's controller to list the job's nodes (at most 20 s)\n"


@pytest.mark.usefixtures("surely")
def test_node_0_is_waited_for_aloud_and_not_forever(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound, so that nobody else gets the port, but not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        refused = pytest.raises(TrainingError, match=rf"could not reach node 0 at 127.0.0.1:{port} in 1 s")
        with refused, node_rendezvous.connect_nodes(Nodes(2, 1, "127.0.0.1", port), 1, NodeInfo()):
            pass
    assert capsys.readouterr().err == f"waiting for node 0 to listen at 127.0.0.1:{port} (at most 1 s)\n"


def test_a_group_average_that_never_ends_is_given_up() -> None:
    ended = threading.Event()
    signal = SimpleNamespace(end=lambda iteration: None, announce=lambda iteration: None)
    averager = GroupAverager(lambda i: None, lambda i: False, SimpleNamespace(rank=0), signal, None, 0.05)
    averager._thread = threading.Thread(target=ended.wait, daemon=True)
    averager._thread.start()
    with pytest.raises(TrainingError, match=r"the last group average has not ended within 0.1 s \(twice run.timeout"):
        averager.finish(3)
    ended.set()
