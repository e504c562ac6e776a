"""Tests of the environment and the clock of a start."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from llmtrain.startup import STARTED, note_command_start, seconds_since_command, single_threaded_imports


def test_imports_of_one_thread_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    monkeypatch.delenv("JE_ARROW_MALLOC_CONF", raising=False)
    before = dict(os.environ)
    with pytest.raises(ImportError), single_threaded_imports():
        assert os.environ["OMP_NUM_THREADS"] == "1"
        raise ImportError
    assert dict(os.environ) == before


def test_the_age_of_a_command_does_not_depend_on_the_second_of_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine booted at 1000.9, for which psutil says 1000. The process was started 7.5 s after the boot, and now is 10 s after
    it."""
    monkeypatch.delenv(STARTED, raising=False)
    monkeypatch.setattr(psutil, "boot_time", lambda: 1000.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 1007.5)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: 10.0)
    monkeypatch.setattr(time, "time", lambda: 1010.9)
    assert seconds_since_command() == pytest.approx(2.5)
    note_command_start()
    assert float(os.environ[STARTED]) == pytest.approx(1008.4) and seconds_since_command() == pytest.approx(2.5)
