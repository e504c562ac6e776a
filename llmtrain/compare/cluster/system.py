"""The system's own programs, by which a cluster is made."""

from __future__ import annotations

import subprocess

COMMAND_SECONDS = 30.0
"""Most that one `ip` or `tc` may take, on a busy machine."""


class CommandError(RuntimeError):
    """A program of the system failed."""


def run(*command: str) -> str:
    """What a command printed. Raises CommandError with what it complained about, also when it does not end in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{' '.join(command)}: did not end within {COMMAND_SECONDS:.0f} s") from None
    if done.returncode:
        raise CommandError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout
