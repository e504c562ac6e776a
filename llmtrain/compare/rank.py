"""Entry point of a rank of a trial: `python -m llmtrain.compare.rank FAULTS RECIPE KEY=VALUE...` trains as
`llmtrain train` does, with faults (JSON of `Faults`)."""

from __future__ import annotations

import os
import sys

from llmtrain.errors import exit_with_status
from llmtrain.startup import imports_without_gc


def main(faults: str, recipe: str, *overrides: str) -> int:
    """Train and return the exit code. torchrun sets the number of this host (GROUP_RANK)."""
    with imports_without_gc():
        from llmtrain.compare.faults import Faults, inject
        from llmtrain.parallel.world import World
        from llmtrain.recipe_loader import load_recipe
        from llmtrain.train.run import run_training

    change = inject(Faults.model_validate_json(faults), host=int(os.environ["GROUP_RANK"]))
    return run_training(load_recipe(recipe, overrides), World.from_environment(), change)


if __name__ == "__main__":
    exit_with_status(lambda: sys.exit(main(*sys.argv[1:])))
