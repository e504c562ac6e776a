"""Output of a process whose terminal may go away, as when an ssh session ends.

Every write to such a terminal fails. The run should end with a checkpoint nevertheless, or go on under nohup.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


class _TerminalStream:
    """Text stream to a terminal. Once a write fails, its file descriptor leads nowhere."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _leave(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def outlive_terminal() -> None:
    """Make this process's output and errors pass over a terminal that is gone. Files and pipes stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty() and not isinstance(stream, _TerminalStream):
            setattr(sys, name, _TerminalStream(stream))
