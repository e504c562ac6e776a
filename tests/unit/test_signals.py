"""Tests of signals that ask a rank to stop, and of a rank whose torchrun is gone."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from queue import SimpleQueue

import pytest
from torch.distributed import DistStoreError, HashStore

from llmtrain.errors import FAILED, TrainingError
from llmtrain.train import signals
from llmtrain.train.signals import stop_requests


def test_a_signal_sets_a_flag_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGUSR1)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_torchrun_does_not_end_a_rank_that_is_about_to_say_why_it_fails(monkeypatch, by_torchrun: bool):
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    monkeypatch.delenv(signals.TORCHRUN, raising=False)
    if by_torchrun:
        monkeypatch.setenv(signals.TORCHRUN, "a run")
    try:
        with pytest.raises(TrainingError), stop_requests() as stop:
            raise TrainingError("lost a peer")
        expected = stop.handle if by_torchrun else before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == expected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("under_nohup", [True, False])
def test_a_hangup_stops_a_run_unless_nohup_ignores_it(under_nohup: bool):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested != under_nohup
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_stops_when_torchrun_is_gone(monkeypatch, by_torchrun: bool):
    parents, sent = iter([7, 7, 1, 1]), threading.Event()
    monkeypatch.setattr(signals.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signals.os, "kill", lambda process, number: sent.set() if number == signal.SIGTERM else None)
    monkeypatch.setattr(signals, "WATCH_SECONDS", 0.0)
    monkeypatch.delenv(signals.TORCHRUN, raising=False)
    if by_torchrun:
        monkeypatch.setenv(signals.TORCHRUN, "a run")
    signals.stop_without_torchrun()
    assert sent.wait(20) if by_torchrun else next(parents) == 7


def test_a_rank_that_stops_is_not_asked_again(monkeypatch):
    """A second SIGTERM would end the rank, and lose the checkpoint that the first one asked for."""
    sent: list[int] = []
    monkeypatch.setattr(signals.os, "kill", lambda process, number: sent.append(number))
    with stop_requests() as stop:
        signals.request_stop()
        assert sent == [signal.SIGTERM]
        stop.notice(signal.SIGTERM)  # while torch's code runs, which delays the handler
        signals.request_stop()
        assert len(sent) == 1
        signal.raise_signal(signal.SIGUSR1)
        signals.request_stop()
        assert len(sent) == 1
    signals.request_stop()
    assert len(sent) == 2


def test_signals_together_are_one_and_a_later_one_of_the_same_kind_ends_at_once(monkeypatch, capfd):
    """They are told apart by the times at which they arrive, although the main thread, within torch's code, runs no handlers."""
    store, exits = HashStore(), SimpleQueue()

    def leave(code: int) -> None:
        exits.put(code)
        store.set("left", "")

    def send(seconds: float, number: int) -> None:
        timer = threading.Timer(seconds, os.kill, [os.getpid(), number])
        timer.daemon = True
        timer.start()

    def work(key: str, seconds: float) -> None:
        """Wait for a key in torch's code."""
        store.wait([key], timedelta(seconds=seconds))

    monkeypatch.setattr(signals.os, "_exit", leave)
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.3)
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGUSR1)
        send(0.05, signal.SIGUSR1)  # of the same request, forwarded by a launcher
        with pytest.raises(DistStoreError):
            work("nothing", 0.5)
        signal.raise_signal(signal.SIGTERM)  # Slurm sends SIGUSR1 first, and its checkpoint goes on
        assert stop.requested and exits.empty()
        send(0.05, signal.SIGUSR1)
        work("left", 20)
        assert exits.get(timeout=20) == FAILED
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("SIGUSR1: stopping within two log lines, with a checkpoint; another SIGUSR1 ends")
    assert second == "a second SIGUSR1: stopped at once; the last complete checkpoint is kept"
