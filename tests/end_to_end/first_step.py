"""`llmtrain launch` with a rank 0 that writes which modules it had imported at its start and after its first step.

Run as a program, this file is one rank: FILE RECIPE KEY=VALUE...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from llmtrain import cli, startup


def launch(file: str, *words: str) -> None:
    """Run `llmtrain launch WORDS` with a rank 0 that writes to `file`."""
    original = startup.import_transformers

    def import_then_replace_ranks() -> None:
        original()
        from llmtrain.launch import rank_server  # no earlier than a normal launch imports it

        rank_server.FORKED = (*rank_server.FORKED[:-1], __file__, file)

    startup.import_transformers = import_then_replace_ranks
    cli.main(["launch", *words])


def train(file: str, recipe: str, *overrides: str) -> None:
    """Train as one rank. Rank 0 writes its modules to `file`."""
    from llmtrain.launch.forked_rank import World, become_a_program, load_recipe, run_training
    from llmtrain.train.trainer import Trainer

    become_a_program()
    at_start = set(sys.modules)

    def write(trainer: Trainer) -> None:
        def after_step(step: int) -> None:
            if step == 1 and os.environ["RANK"] == "0":
                models = type(sys.modules["transformers.models"]).__name__
                found = {"at start": sorted(at_start), "after a step": sorted(sys.modules), "models": models}
                Path(file).write_text(json.dumps(found))

        trainer.after_step.append(after_step)

    sys.exit(run_training(load_recipe(Path(recipe), overrides), World.from_environment(), write))


if __name__ == "__main__":
    train(*sys.argv[1:])
