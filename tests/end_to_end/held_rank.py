"""`llmtrain launch` with a rank 1 that waits for a signal after a given step, so that a test interrupts the run at this
step, however fast or busy the machine is.

Run as a program, this file is one rank: STEP FILE RECIPE KEY=VALUE...
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import signal
import socket
import sys
from pathlib import Path

from llmtrain.errors import exit_with_status
from tests.mother import run_llmtrain

SECONDS = 120.0
"""Maximum seconds that the rank waits. A run that no test interrupts fails."""


def launch(step: int, file: str, *words: str) -> None:
    """Run `llmtrain launch WORDS`. After `step`, rank 1 creates `file` and waits for a signal, or to be killed. If the
    file exists already, as for a restarted rank, rank 1 does not wait."""
    from llmtrain.launch import rank_server  # here, because its many imports would slow down the collection of tests

    program = (str(step), file)
    rank_server.FORKED = (*rank_server.FORKED[:-1], __file__, *program)
    rank_server.SPAWNED = ("-m", __name__, *program)
    run_llmtrain("launch", *words)


def main(step: str, file: str, recipe: str, *overrides: str) -> int:
    """Train as one rank, and return the exit code."""
    from llmtrain.launch import forked_rank
    from llmtrain.train.trainer import Trainer

    def alter(trainer: Trainer) -> None:
        trainer.after_step.append(hold)

    def hold(trained: int) -> None:
        if trained == int(step) and not Path(file).exists():
            wait_for_signal(Path(file))

    if os.environ["RANK"] == "1":
        forked_rank.run_training = functools.partial(forked_rank.run_training, alter=alter)
    return forked_rank.train(recipe, list(overrides))


def wait_for_signal(file: Path) -> None:
    """Create `file`, and wait until this process has handled a signal. Raises AssertionError after SECONDS."""
    ours, of_signals = socket.socketpair()
    of_signals.setblocking(False)
    before = signal.set_wakeup_fd(of_signals.fileno())  # before the file exists, so that no later signal is missed
    try:
        file.touch()
        assert select.select([ours], [], [], SECONDS)[0], f"no signal within {SECONDS:g} s"
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        of_signals.close()


if __name__ == "__main__":
    if multiprocessing.parent_process() is not None:  # forked; otherwise torchrun has spawned this program
        from llmtrain.launch.forked_rank import become_a_program

        become_a_program()
    exit_with_status(lambda: sys.exit(main(*sys.argv[1:])))
