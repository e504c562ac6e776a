"""Tests of a launcher's watchdog: the ranks that it ends when others have failed, and the signals that it forwards."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from llmtrain.launch import watchdog
from llmtrain.train.signals import handled
from tests.end_to_end.runs import wait_until
from tests.mother import session
from tests.unit import processes


class Launcher:
    """A launcher in a process of its own, whose ranks end when they are let go."""

    def __init__(self, folder: Path, ranks: int):
        self.folder = folder
        commands = [
            f"for _ in {{1..1200}}; do [ -e {folder}/{rank} ] && exit; sleep 0.05; done" for rank in range(ranks)
        ]
        self._looks, self._failed = folder / "looks", folder / "failed"
        self._looks.touch()
        files = str(self._looks), str(self._failed)
        self._process = session().fork(processes.launch, *files, *commands, capture=True)
        self.ranks = [psutil.Process(int(pid)) for pid in self._process.stdout.readline().split()]

    def let_go(self, rank: int) -> None:
        """Let a rank end."""
        (self.folder / str(rank)).touch()

    def fail_elsewhere(self) -> None:
        """Tell the launcher that ranks of another node have failed."""
        self._failed.touch()

    def wait_for_looks(self, times: int) -> None:
        """Wait until the launcher has looked at its ranks `times` more times."""
        before = self._looks.stat().st_size
        wait_until(lambda: self._looks.stat().st_size >= before + times, "the launcher has not looked")

    def ended(self) -> list[str]:
        """Wait until all ranks have ended, and return their exit codes."""
        output, _ = self._process.communicate(timeout=60)
        return output.split()


def test_a_frozen_rank_is_ended_once_another_has_ended(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 3)
    frozen, _, alive = launcher.ranks
    frozen.suspend()
    launcher.let_go(1)
    wait_until(lambda: not frozen.is_running(), "the frozen rank still runs")
    assert alive.is_running() and alive.status() != psutil.STATUS_ZOMBIE
    launcher.let_go(2)
    assert launcher.ended() == ["-9", "0", "0"]


def test_all_ranks_are_ended_when_those_of_another_node_have_failed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 2)
    launcher.fail_elsewhere()
    assert launcher.ended() == ["-9", "-9"]


def test_a_frozen_rank_among_ranks_that_train_is_left_alone(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 2)
    frozen = launcher.ranks[0]
    frozen.suspend()
    launcher.wait_for_looks(20)  # takes more than three times its patience
    assert frozen.status() == psutil.STATUS_STOPPED
    frozen.resume()
    launcher.let_go(0)
    launcher.let_go(1)
    assert launcher.ended() == ["0", "0"]


def test_ctrl_c_is_passed_on_although_it_has_ended_who_reads_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, text: bytes) -> int:
        raise BrokenPipeError

    with monkeypatch.context() as patched, watchdog.stop_on_signals():
        patched.setattr(os, "write", write)
        with pytest.raises(SignalException) as asked:
            signal.raise_signal(signal.SIGINT)
    assert asked.value.sigval == signal.SIGTERM


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_only_the_same_signal_again_interrupts_the_checkpoint_that_the_first_asked_for(first: signal.Signals) -> None:
    """If another signal interrupted torchrun while it waits for ranks that stop, torchrun would ask them again, and they would end at
    once."""
    kinds = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT}
    with handled(kinds, lambda number, frame: None), watchdog.stop_on_signals():
        with pytest.raises(SignalException) as asked:
            signal.raise_signal(first)
        for other in kinds - {first}:
            signal.raise_signal(other)
        with pytest.raises(SignalException):
            signal.raise_signal(first)
    assert asked.value.sigval == first


def test_processes_that_end_while_they_are_looked_at_have_no_children() -> None:
    ended = subprocess.Popen(["true"])
    process = psutil.Process(ended.pid)
    ended.wait()
    assert watchdog._children(process) == set()
