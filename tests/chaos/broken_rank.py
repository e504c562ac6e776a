"""`llmtrain train` in which one rank stops or kills itself in a chosen phase: PHASE SIGNAL RANK FILE RECIPE KEY=VALUE...

The rank writes the time to FILE. The process is forked by the server that `broken_launch` has started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.errors import exit_with_status
from llmtrain.launch.forked_rank import become_a_program
from llmtrain.parallel.ranks import Processes
from llmtrain.parallel.world import World
from llmtrain.recipe_loader import load_recipe
from llmtrain.train import checkpoint_files, run
from llmtrain.train.trainer import Trainer

STEP = 5
"""Step of the first round in which a rank breaks, if it breaks in a local step."""


def before(owner: Any, name: str, happen: Callable[[], None], calls: int = 1) -> None:
    """Call `happen` before call number `calls` of the function `name` of `owner`."""
    original, called = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called += 1
        if called == calls:
            happen()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


OF_TRAINER: dict[str, Callable[[Trainer, Callable[[], None]], None]] = {
    "in a local step": lambda trainer, happen: before(trainer.engine, "step", happen, STEP),
    "in a synchronization": lambda trainer, happen: before(trainer.method.block_sync, "outer_step", happen, 2),
    "in a validation": lambda trainer, happen: before(trainer, "validate", happen, 2),
    "at the end": lambda trainer, happen: before(trainer.method, "finish", happen),
}
OF_MODULE = {
    "while data is prepared": (run, "prepare_texts"),
    "while groups are made": (Processes, "open_mesh"),
    "while a checkpoint is written": (checkpoint_files.dcp, "save"),
    "while a checkpoint is sealed": (checkpoint_files.CheckpointWriter, "_commit"),
}
AT_ONCE = "while ranks start"
SECOND_WRITE = "while the second checkpoint is written"
"""Phase in which the other ranks write their parts and this one does not begin. It is not one of `PHASES`."""
PHASES = (AT_ONCE, *OF_MODULE, *OF_TRAINER)


def main(phase: str, number: str, rank: str, file: str, recipe: str, *overrides: str) -> None:
    world = World.from_environment()

    def happen() -> None:
        Path(file).write_text(str(time.time()))
        os.kill(os.getpid(), signal.Signals[number])

    def alter(trainer: Trainer) -> None:
        if world.rank == int(rank) and phase in OF_TRAINER:
            OF_TRAINER[phase](trainer, happen)

    if world.rank == int(rank):
        if phase == AT_ONCE:
            happen()
        if phase == SECOND_WRITE:
            before(checkpoint_files.dcp.FileSystemWriter, "write_data", happen, calls=2)
        if phase in OF_MODULE:
            before(*OF_MODULE[phase], happen)
    sys.exit(run.run_training(load_recipe(Path(recipe), overrides), world, alter))


if __name__ == "__main__":
    become_a_program()
    exit_with_status(lambda: main(*sys.argv[1:]))
