"""The process that forks ranks, and what it shares with the launcher from which it was forked."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import resource_tracker, synchronize
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import psutil
import pytest

from llmtrain.launch.rank_server import FORKED, SPAWNED, rank_server
from llmtrain.stop_signals import STOP_SIGNALS
from tests.mother import session

MARK = "imported_by_the_launcher"


def report() -> None:
    """Print the server's id and open files, and whether this process, forked by the server, has the launcher's module."""
    server = os.getppid()
    files = []
    for link in Path(f"/proc/{server}/fd").iterdir():
        with suppress(FileNotFoundError):  # the server closes some while it forks
            files.append(os.readlink(link))
    print("report " + json.dumps({"server": server, "files": files, "has mark": MARK in sys.modules}), flush=True)


def forked_report() -> int | None:
    """Have the server fork a process that reports, and return the exit code of that process."""
    process = multiprocessing.get_context("forkserver").Process(target=report)
    process.start()
    process.join()
    return process.exitcode


def use_server(file: str) -> None:
    """Act as a launcher with an open file, buffered text and signal handlers, and send the server a scheduler's signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: sys.exit(f"{signal.Signals(number).name} in the launcher's code"))
    sys.modules[MARK] = ModuleType(MARK)
    # A process of tests.mother forks the tracker, too, so it must start before text is in the buffer.
    resource_tracker.ensure_running()
    sys.stdout.reconfigure(line_buffering=False, write_through=False)
    print("in the buffer")
    with open(file), rank_server() as program:
        assert program == FORKED
        [server] = [child for child in psutil.Process().children() if forks(child)]
        assert forked_report() == 0
        for number in STOP_SIGNALS:
            server.send_signal(number)
        assert forked_report() == 0
    assert not server.is_running()


def forks(process: psutil.Process) -> bool:
    """Return whether a child of this process is the server, and not multiprocessing's resource tracker."""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            if "socket:" in os.readlink(link):
                return True
    return False


def use_server_with_a_thread() -> None:
    """Act as a launcher that has a thread."""
    over = threading.Event()
    threading.Thread(target=over.wait).start()
    with rank_server() as program:
        assert program == SPAWNED and not psutil.Process().children()
    over.set()


def use_server_without(what: str, folder: str) -> None:
    """Act as a launcher without shared memory, without a temporary folder, or with a long path to it."""
    if what == "shared memory":
        synchronize.Lock = Mock(side_effect=FileNotFoundError(errno.ENOENT, "No such file"))
    else:
        tempfile.tempdir = folder
    with rank_server() as program:
        assert program == SPAWNED and not psutil.Process().children()


@pytest.mark.parametrize("what", ["shared memory", "a short path", "a temporary folder"])
def test_ranks_are_spawned_where_there_can_be_no_server(tmp_path: Path, what: str) -> None:
    folder = tmp_path / ("none" if what == "a temporary folder" else 80 * "a")
    if what == "a short path":
        folder.mkdir()
    process = session().fork(use_server_without, what, str(folder), capture=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


def test_it_shares_the_launchers_modules_but_not_its_files_signals_and_output(tmp_path: Path) -> None:
    file = tmp_path / "of the launcher"
    file.touch()
    process = session().fork(use_server, str(file), capture=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.count("in the buffer") == 1
    reports = [json.loads(line.removeprefix("report ")) for line in output.splitlines() if line.startswith("report ")]
    assert len(reports) == 2 and all(one["has mark"] for one in reports), output
    assert reports[0]["server"] == reports[1]["server"] and not any(str(file) in one["files"] for one in reports)


def test_a_launcher_with_threads_is_not_forked() -> None:
    process = session().fork(use_server_with_a_thread, capture=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
