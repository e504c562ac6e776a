"""Commands of llmtrain run in the process of a test, with everything that they print."""

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
"""Wall time after which a command counts as hanging, on a busy machine as well."""


# typer inspects all commands anew each time that one is run, for 30 ms; an interpreter of its own does so once.
typer.main.get_command = functools.cache(typer.main.get_command)


class Hang(BaseException):
    """A case that takes too long; no `except Exception` catches it."""


def _give_up(*_: object) -> None:
    raise Hang


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], str]]:
    """Redirect both standard streams, of Python and of the process, into a file; yields a function that reads it."""
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
    """Return the file into which output is redirected: one for all cases, because libraries' loggers keep their stream."""
    return tempfile.TemporaryFile("a+", encoding="utf-8", errors="backslashreplace")


def run_here(command: list[str] | Callable[[], object]) -> tuple[int | None, str]:
    """Run a command, or a function as one, in this process; return its exit code and output. The code is None for a hang."""
    code: int | None = None
    before = signal.signal(signal.SIGALRM, _give_up)
    with _captured() as read:
        left, _ = signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)  # of pytest-timeout
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
    """Return the lines of an output that say what went wrong: ours, or the command line parser's."""
    return [line for line in output.splitlines() if line.startswith("error: ") or "─ Error ─" in line]


def message_of(output: str) -> str:
    """Return the one message of an output that says what went wrong, without its frame if the parser of the command line drew one."""
    for line in output.splitlines():
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    _, _, box = output.partition("─ Error ─")
    return " ".join(line.strip("│ ") for line in box.splitlines()[1:] if line.startswith("│"))
