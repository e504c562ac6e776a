"""Execution of the system programs that create a cluster."""

from __future__ import annotations

import subprocess

COMMAND_SECONDS = 30.0
"""Timeout of one `ip` or `tc` command on a busy machine."""


class CommandError(RuntimeError):
    """Failure of a system program."""


def run(*command: str) -> str:
    """Run a command and return its standard output.

    Raises CommandError with its error output if it fails, and also if it does not end in time.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{' '.join(command)}: did not end within {COMMAND_SECONDS:.0f} s") from None
    if done.returncode:
        raise CommandError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout
