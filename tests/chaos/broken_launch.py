"""`llmtrain launch` with ranks one of which breaks (`broken_rank`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain.errors import exit_with_status
from llmtrain.launch import torchrun
from tests.chaos import broken_rank

GIVEN_SECONDS = 300
"""What torchrun gives ranks to end here, instead of 30: a run that ends in time has ended its frozen rank by itself."""


def launch(phase: str, number: str, rank: str, file: str, recipe: str, *overrides: str) -> None:
    """Launch a recipe; its rank so-and-so sends itself that signal in that phase, and writes the time of it to a file."""
    from torch.distributed.elastic.multiprocessing import PContext

    original, close = torchrun.rank_server, PContext.close

    @contextmanager
    def server() -> Iterator[Sequence[str]]:
        with original() as (*options, _):
            assert options[-1] == "--run-path", "ranks are not forked"
            yield [*options, str(Path(broken_rank.__file__)), phase, number, rank, file]

    def close_late(context: PContext, death_sig: Any = None, timeout: int = 30) -> None:
        close(context, death_sig, GIVEN_SECONDS)

    torchrun.rank_server, PContext.close = server, close_late
    exit_with_status(lambda: sys.exit(torchrun.launch_torchrun(Path(recipe), overrides)))
