"""Output of a process whose reader may disappear, such as a terminal whose ssh session ends, or `tee`.

From then on, every write fails, as it does while the disk of a log file is full. The run should nevertheless end with a
checkpoint or, under nohup, continue.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO

READER_IS_GONE = {errno.EIO, errno.EPIPE}
"""Numbers of errors that mean that the reader is gone for good. Other errors, such as a full disk, may be temporary."""


class _LastingStream:
    """Text stream that raises no OSError: text that can't be written is lost. Once the reader is gone, the stream
    writes to /dev/null."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._pass_over(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._pass_over(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _pass_over(self, error: OSError) -> None:
        if error.errno in READER_IS_GONE:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def outlive_readers() -> None:
    """Make this process ignore errors in writing its output, caused by a lost terminal or pipe, or by a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _LastingStream):
            setattr(sys, name, _LastingStream(stream))
