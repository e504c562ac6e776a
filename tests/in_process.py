"""Helpers that run llmtrain's commands in the process of a test and capture all that they print."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import typer.main

from llmtrain.cli import main
from llmtrain.errors import exit_with_status

HANG_SECONDS = 120.0
"""Wall time after which a command counts as hanging, even on a busy machine."""


# typer inspects all commands each time that a command runs, which takes 30 ms. A separate program does so only once.
typer.main.get_command = functools.cache(typer.main.get_command)


class Hang(BaseException):
    """Timeout of a command. No `except Exception` catches it."""


def _give_up(*_: object) -> None:
    raise Hang


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], str]]:
    """Redirect standard output and error, Python's and the process's, into a file. Yields a function that reads it."""
    file = _output()
    file.seek(0)
    file.truncate()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield lambda: (file.flush(), file.seek(0), file.read())[2]
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


@functools.cache
def _output() -> TextIO:
    """Return the file for the output. All commands share it, because loggers of libraries keep their stream."""
    return tempfile.TemporaryFile("a+", encoding="utf-8", errors="backslashreplace")


def run_here(command: list[str] | Callable[[], object]) -> tuple[int | None, str]:
    """Run a command, or a function as if it were one, in this process. Return the exit code, which is None for a hang,
    and the output."""
    code: int | None = None
    before = signal.signal(signal.SIGALRM, _give_up)
    with _captured() as read:
        left, _ = signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)  # what was left of pytest-timeout's timer
        began = time.monotonic()
        try:
            main(command) if isinstance(command, list) else exit_with_status(command)
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except Hang:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - began)))
        return code, read()


def error_lines(output: str) -> list[str]:
    """Return the lines of an output that are error messages."""
    return [line for line in output.splitlines() if line.startswith("error: ")]


def message_of(output: str) -> str:
    """Return the first error message in an output, or an empty text."""
    return next(iter(error_lines(output)), "").removeprefix("error: ")
