"""Tests of the CPU time that other programs take during a trial, and of what counts as the trial's own."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llmtrain.compare import other_load as module
from llmtrain.compare.other_load import cpu_seconds, other_load

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_cpu_time_of_children_that_have_ended_is_the_trials_own() -> None:
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"])
    after = cpu_seconds()
    assert after.own - before.own >= 0.25
    assert after.total >= after.busy >= before.busy


def test_cpu_time_of_children_that_run_is_the_trials_own() -> None:
    """The process that delays packets, for example, still runs when the trial has ended."""
    before = cpu_seconds()
    burning = f"{BURN}\nprint('burned', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", burning], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "burned\n"
        assert cpu_seconds().own - before.own >= 0.25
        child.communicate("\n")


class Machine:
    """Machine on which this process has two children, one of which ends while the children are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = {
            "user": 10.0,
            "nice": 2.0,
            "system": 3.0,
            "idle": 50.0,
            "softirq": 1.0,
            "steal": 0.0,
            "guest": 9.0,
        }
        self.child = 1.0
        monkeypatch.setattr(module.psutil, "cpu_times", lambda: SimpleNamespace(**self.times))
        monkeypatch.setattr(module.psutil, "Process", self.process)

    def process(self) -> Any:
        def ended() -> None:
            raise psutil.NoSuchProcess(7)

        def with_times(user: float) -> Any:
            times = SimpleNamespace(user=user, system=0.5, children_user=0.25, children_system=0.25)
            return SimpleNamespace(cpu_times=lambda: times)

        children = [with_times(self.child), SimpleNamespace(cpu_times=ended)]
        return SimpleNamespace(cpu_times=with_times(1.0).cpu_times, children=lambda recursive: children)


@pytest.mark.parametrize(
    ("passed", "own", "share"),
    [
        ({"user": 4.0, "idle": 6.0}, 4.0, 0.0),
        ({"user": 4.0, "idle": 6.0}, 4.5, 0.0),
        ({"user": 4.0, "idle": 6.0}, 1.5, 0.25),
        ({"user": 4.0, "nice": 1.0, "system": 1.0, "steal": 1.0, "idle": 3.0}, 4.0, 0.3),
        ({"user": 4.0, "softirq": 2.0, "guest": 5.0, "idle": 4.0}, 4.0, 0.0),
        ({}, 0.0, None),
    ],
    ids=["none", "less than none", "a quarter", "of all kinds", "interrupts", "not counted"],
)
def test_the_share_of_other_programs(
    monkeypatch: pytest.MonkeyPatch, passed: dict[str, float], own: float, share: float | None
) -> None:
    machine = Machine(monkeypatch)
    before = cpu_seconds()
    assert before == (66.0, 15.0, 4.0)
    machine.times = {kind: seconds + passed.get(kind, 0.0) for kind, seconds in machine.times.items()}
    machine.child += own
    assert other_load(before) == share
