"""`llmtrain launch` whose first rank writes which modules it had when it began and after its first step.

As a program it is one rank: FILE RECIPE KEY=VALUE...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from llmtrain import cli, startup


def launch(file: str, *words: str) -> None:
    """`llmtrain launch WORDS`; the first rank writes to `file`."""
    original = startup.import_transformers

    def import_then_replace_ranks() -> None:
        original()
        from llmtrain.launch import rank_server  # only now, as in a command that nobody observes

        rank_server.FORKED = (*rank_server.FORKED[:-1], __file__, file)

    startup.import_transformers = import_then_replace_ranks
    cli.main(["launch", *words])


def train(file: str, recipe: str, *overrides: str) -> None:
    """Train as one rank that writes its modules."""
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
