"""Tests of the lines that a run shows and writes: its loggers after a failure and after a resume, the warning about a rising loss,
the bytes of averaged gradients, and the numbers of rounds."""

from __future__ import annotations

import errno
import io
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from llmtrain.errors import TrainingError
from llmtrain.train import run_log
from llmtrain.train.loggers import Console
from llmtrain.train.metrics import Metrics, rise_of_loss
from llmtrain.train.run_log import RunLog
from llmtrain.train.state import TrainState
from llmtrain.train.summary import every_step_bytes


def test_an_error_before_the_first_step_closes_what_was_opened() -> None:
    """Errors that other ranks have found are raised between the opening of the loggers and the first step."""

    def refuse() -> None:
        raise TrainingError("a damaged shard")

    closed = []
    logger = SimpleNamespace(close=lambda failed=False: closed.append(failed))
    console = SimpleNamespace(print=print, stop=lambda: None)
    io_errors = SimpleNamespace(check=refuse, write=lambda path, make: [logger])
    log = RunLog(None, SimpleNamespace(metrics=None), console, io_errors, is_main=True)
    with pytest.raises(TrainingError), log.open(TrainState(2), 0, None):
        raise AssertionError("nothing is trained")
    assert closed == [True]


@pytest.mark.parametrize("problem", [None, OSError(errno.ENOSPC, "No space left on device"), ValueError("closed")])
def test_a_run_that_fails_on_a_terminal_closes_its_files_and_shows_the_cursor_again(
    monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    def close(failed: bool = False) -> None:
        closed.append(failed)
        if problem is not None:
            raise problem

    console, screen, closed = Console(enabled=True), io.StringIO(), []
    console.out = RichConsole(file=screen, force_terminal=True)
    monkeypatch.setattr(run_log, "open_loggers", lambda *_: [SimpleNamespace(close=close)] * 2)
    io_errors = SimpleNamespace(check=lambda: None, write=lambda path, work: work())
    log = RunLog(None, SimpleNamespace(metrics=None), console, io_errors, is_main=True)
    with pytest.raises(TrainingError, match=r"^a rank is gone$"), log.open(TrainState(2), 0, rounds=1):
        raise TrainingError("a rank is gone")
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert 0 <= screen.getvalue().rfind(hidden) < screen.getvalue().rfind(shown)
    assert closed == [True, True]


def test_a_loss_that_hardly_rises_is_no_run_that_diverges() -> None:
    """The loss of a run that begins with trained weights rises while its learning rate does."""
    assert rise_of_loss(3.0, 3.0, False) is None
    assert rise_of_loss(3.1785, 3.1804, False) == (
        "validation loss 3.1804 is not below the 3.1785 before the first step; if it stays higher, lower optim.lr"
    )
    found = [(3.2, False), (3.2, True), (3.5, True), (float("nan"), True)]
    assert ["is diverging" in (rise_of_loss(3.0, *after) or "") for after in found] == [True, False, True, True]


def test_what_averaged_gradients_would_send_is_counted_for_the_replicas_of_each_step() -> None:
    def line(step: int, **tags: float) -> dict[str, float]:
        return {"step": step, "train/lr": 0.1, **tags}

    two = [line(1, **{"comm/replicas": 2}), line(40, **{"comm/replicas": 2}), {"step": 40, "eval/loss": 3.0}]
    assert every_step_bytes([*two, line(44, **{"comm/replicas": 4})], 10) == 80 * (40 * 1 + 4 * 3)


def test_a_fast_replica_of_a_timed_run_continues_its_files_after_the_step_of_all(monkeypatch) -> None:
    """The replica's own step is beyond that of the checkpoint. Lines of steps after the checkpoint are logged again."""
    opened = []
    monkeypatch.setattr(run_log, "open_loggers", lambda recipe, directory, *resumed: opened.append(resumed[:2]))
    period = SimpleNamespace(round_number=lambda step: None)
    quiet = SimpleNamespace(print=print, start=lambda *given: opened.append(given), stop=lambda: None)
    io_errors = SimpleNamespace(check=lambda: None, write=lambda path, work: work())
    log = RunLog(None, SimpleNamespace(metrics=None), quiet, io_errors, is_main=True)
    method, interval = SimpleNamespace(period=period), SimpleNamespace(steps=3)
    fake = SimpleNamespace(run_log=log, tokens=700, interval=interval, method=method)
    with Metrics.open(fake, TrainState(total_steps=20, step=9, global_step=6)):
        pass
    assert opened == [(6, 700), (6, 20, None)]


@pytest.mark.parametrize(("step", "number"), [(15, 4), (20, 3)])
def test_a_round_of_seconds_has_the_number_after_those_counted_except_at_the_end(step: int, number: int) -> None:
    period, stats = SimpleNamespace(round_number=lambda step: None), SimpleNamespace(count=3)
    fake = SimpleNamespace(method=SimpleNamespace(period=period, stats=stats))
    assert Metrics._round_number(fake, TrainState(total_steps=20, step=step, global_step=step)) == number
