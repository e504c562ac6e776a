"""Faults of a comparison's hosts at their times, and what is shown on a terminal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmtrain.compare import progress as compare_progress
from llmtrain.compare.comparison import ConditionSection
from llmtrain.compare.events import Events
from llmtrain.compare.faults import Faults
from llmtrain.config import PenaltySection
from llmtrain.data.progress import Progress
from llmtrain.sync.penalty import Penalty
from llmtrain.train.console import Console


class RecordingHost:
    """A host that notes what is done to it."""

    def __init__(self, number: int, done: list[str]) -> None:
        self.number, self._done = number, done

    def pause(self) -> None:
        self._done.append(f"pause {self.number}")

    def resume(self) -> None:
        self._done.append(f"resume {self.number}")

    def kill(self) -> None:
        self._done.append(f"kill {self.number}")


def test_hosts_stop_go_on_and_die_at_their_times() -> None:
    done: list[str] = []
    condition = ConditionSection.model_validate(
        {"pauses": [{"host": 0, "at": 4.0, "seconds": 3.0}], "kills": [{"host": 1, "at": 5.0}]}
    )
    events = Events(condition, [RecordingHost(number, done) for number in range(2)])
    seen = []
    for seconds in (3.9, 4.0, 6.9, 7.5, 9.0):
        events.advance(seconds)
        seen.append(list(done))
        done.clear()
    assert seen == [[], ["pause 0"], ["kill 1"], ["resume 0"], []]
    events.end()
    assert done == ["resume 0"], "a host that is paused when the trial ends goes on"


def test_without_faults_nobody_sleeps_or_reads_garbage() -> None:
    faults = Faults(seed=1, hosts=2)
    assert faults.delay(0, 1) == 0.0 and not faults.reads_garbage(0, 1)


def test_a_penalty_may_leave_averages_unclipped() -> None:
    squares = torch.tensor([0.25, 1e6])
    unclipped = Penalty(PenaltySection(clip=None), replicas=2, blocks=2)
    assert torch.equal(unclipped.clip_factor(squares), torch.ones(2))
    clipped = Penalty(PenaltySection(clip=1.0), replicas=2, blocks=2)
    torch.testing.assert_close(clipped.clip_factor(squares), torch.tensor([1.0, 1e-3]))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes what it writes to for a terminal."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_training_has_a_bar_on_a_terminal(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(enabled=True)
    console.start(3, 8)
    console.advance(4)
    tags = {"train/loss": 4.0, "train/lr": 1e-3, "train/grad_norm": 1.0, "perf/tokens_per_second": 41_200.0}
    tags |= {"perf/mfu": 0.41, "sync/count": 2.0, "comm/bytes_total": 2e6, "perf/peak_memory_gib": 1.5}
    console.line(4, 100, tags)
    console.stop()
    shown = capsys.readouterr().out
    assert "training" in shown and "4/8" in shown and "41.2k tok/s | mfu 41.0% | sync 2 rounds 2MB" in shown
    assert "eta" not in shown, "the bar tells it"


def test_a_comparison_has_a_bar_for_all_trials_and_one_for_this_one(
    terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = compare_progress.Progress(3)
    planned = SimpleNamespace(condition="thin", run="diloco", seed=7)
    record = SimpleNamespace(state="failed", wall_seconds=75.0, last_lines=["the reason"])
    bars.skip(planned)
    bars.begin(1, planned, 60)
    bars.advance(30)
    bars.end(record, 3700.0)
    bars.close()
    shown = capsys.readouterr().out
    assert "2/3" in shown and "30/60" in shown
    assert "thin · diloco · seed 7: failed in 1 min 15 s; about 1 h 1 min left" in shown and "the reason" in shown


def test_preparing_says_how_far_it_is_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmtrain.data.progress.PLAIN_SECONDS", 0.0)
    with Progress("train", 4_000_000, show=True) as progress:
        progress.advance(5_000_000, 1_250_000)
    assert "train: 5.0 MB, 1.25 M tokens" in capsys.readouterr().err.splitlines()[0]
