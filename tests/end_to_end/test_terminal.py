"""Tests of training in a terminal: progress bars, Ctrl-C once and twice, and the end of the terminal."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.runs import Runs, summary
from tests.mother import Process, run_llmtrain, session

SECONDS = 120.0
CTRL_C = b"\x03"
CODES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
"""Escape sequences for colors and cursor moves."""
ENDLESS = ("train.steps=100000", "parallel.replicas=2", "parallel.shards=1", "log.tensorboard=false")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("terminal"))


def run_on_terminal(terminal: int, *arguments: str) -> None:
    """Run `llmtrain ARGUMENTS` in this process, a fork of the mother, with a controlling terminal."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(terminal, stream)
    run_llmtrain(*arguments)


class Terminal:
    """User's end of a pseudo-terminal in which a command runs."""

    def __init__(self, process: Process, descriptor: int) -> None:
        self.process, self.descriptor, self.shown = process, descriptor, ""
        self._found = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character

    def wait_for(self, words: str | None) -> None:
        """Read until `words` are shown, after the words of earlier calls. With None, read to the end of the output."""
        deadline = time.monotonic() + SECONDS
        while words is None or words not in self.shown[self._found :]:
            assert select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], self.shown
            try:
                part = os.read(self.descriptor, 1 << 16)
            except OSError:  # no process has the terminal any more
                part = b""
            assert part or words is None, self.shown
            self.shown += self._decoder.decode(part, final=not part)
            if not part:
                return
        self._found = self.shown.index(words, self._found) + len(words)


@contextlib.contextmanager
def terminal_of(runs: Runs, name: str, *keys: str) -> Iterator[Terminal]:
    """Start an endless run of two ranks in a pseudo-terminal, and kill its launcher on exit."""
    person, terminal = pty.openpty()
    variables = {**runs.environment, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    arguments = runs.command(name, *ENDLESS, *keys)[2:]
    process = session().fork(run_on_terminal, "launch", *arguments, environment=variables, descriptors=[terminal])
    os.close(terminal)
    try:
        yield Terminal(process, person)
    finally:
        process.kill()
        process.wait(SECONDS)
        os.close(person)


def test_bars_are_drawn_and_ctrl_c_ends_with_a_checkpoint(runs: Runs) -> None:
    with terminal_of(runs, "once", "log.every=2") as terminal:
        terminal.wait_for("loading torch")
        terminal.wait_for("step 4/100000 | loss")
        terminal.wait_for("━")
        os.write(terminal.descriptor, CTRL_C)
        terminal.wait_for("stopping within two log lines, with a checkpoint; Ctrl-C again ends all ranks at once")
        terminal.wait_for(None)
        assert terminal.process.wait(SECONDS) == 3
    text = CODES.sub("", terminal.shown)
    assert "training ━" in text and "\x1b" not in text and "�" not in text
    assert "Traceback" not in text and "torch/distributed" not in text and "warning" not in text.lower()
    result = summary(runs.path("once"))
    assert f"stopped at step {result['steps']}; start the same command again to continue" in text
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l"), "the cursor is shown again"
    assert (Path(runs.path("once")) / f"checkpoints/step-{result['steps']:08d}/state.json").is_file()


def test_a_second_ctrl_c_ends_at_once_and_says_so(runs: Runs) -> None:
    """The next log line, at which ranks would agree to stop, is far away."""
    with terminal_of(runs, "twice", "log.every=100000", "checkpoint.every=null") as terminal:
        terminal.wait_for("step 1/100000 | loss")
        os.write(terminal.descriptor, CTRL_C)
        terminal.wait_for("Ctrl-C again ends all ranks at once")
        os.write(terminal.descriptor, CTRL_C)
        terminal.wait_for("all ranks of this node are killed at once; the last complete checkpoint is kept")
        terminal.wait_for(None)
        assert terminal.process.wait(SECONDS) == 1
    assert "Traceback" not in terminal.shown


def test_a_run_whose_terminal_is_gone_stops_with_a_checkpoint(runs: Runs) -> None:
    """The terminal closes, as at the end of an ssh session, while the ranks log every step and thus write to it."""
    with terminal_of(runs, "gone", "log.every=1") as terminal:
        terminal.wait_for("step 4/100000 | loss")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, terminal.descriptor)  # closes the user's end
        os.close(nothing)
        assert terminal.process.wait(SECONDS) == 3
    result = summary(runs.path("gone"))
    assert result["stopped"] == "signal"
    assert (Path(runs.path("gone")) / f"checkpoints/step-{result['steps']:08d}/state.json").is_file()
