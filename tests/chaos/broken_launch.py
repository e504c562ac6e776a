"""`llmtrain launch` with ranks of which one breaks (`broken_rank`)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmtrain.errors import exit_with_status
from llmtrain.launch import torchrun
from tests.chaos import broken_rank

GIVEN_SECONDS = 300
"""Seconds that torchrun gives a frozen rank to end, instead of 30. If a run ends earlier, llmtrain has ended the frozen rank."""


def launch(phase: str, number: str, rank: str, file: str, recipe: str, *overrides: str) -> None:
    """Launch a recipe. In `phase`, rank `rank` writes the time to `file` and sends itself the signal named `number`."""
    from torch.multiprocessing import ProcessContext

    original = torchrun.rank_server

    @contextmanager
    def server() -> Iterator[Sequence[str]]:
        with original() as (*options, _):
            assert options[-1] == "--run-path", "ranks are not forked"
            yield [*options, str(Path(broken_rank.__file__)), phase, number, rank, file]

    torchrun.rank_server = server
    if number == "SIGSTOP":  # the other ranks end by themselves, and torchrun must not end the frozen one in time
        ProcessContext.join = functools.partialmethod(ProcessContext.join, grace_period=GIVEN_SECONDS)
    exit_with_status(lambda: sys.exit(torchrun.launch_torchrun(Path(recipe), overrides)))
