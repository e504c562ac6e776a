"""Run of the study in which one replica has a fault (study_faults.py).

    python benchmarks/study/faulty_run.py FAULT RECIPE KEY=VALUE...

Trains as `llmtrain train` does, with the replicas in one process.
"""

from __future__ import annotations

import sys

from llmtrain.startup import imports_without_gc

with imports_without_gc():
    from llmtrain.compare.faults import GarbageLoader
    from llmtrain.errors import exit_with_status
    from llmtrain.parallel.world import World
    from llmtrain.recipe_loader import load_recipe
    from llmtrain.train.run import run_training
    from llmtrain.train.trainer import Trainer

REPLICA, FIRST, LAST = 3, 301, 340
"""Replica with the fault, and first and last step of the fault. These four rounds come long after the penalty's first ten."""
FLIPPED = 2.0**16
"""Factor by which a flipped bit of the exponent changes a weight."""
GRADIENTS, RATES = 1000.0, 10.0
"""Factors of inflated gradients and of a wrong inner learning rate."""
FAULTS = ("bits", "rate", "documents", "gradients")


def inject(trainer: Trainer, fault: str) -> None:
    """Add a fault to the trainer if it belongs to REPLICA. Raises ValueError for an unknown fault."""
    engine, state = trainer.engine, trainer.state
    if trainer.checkpointer.mesh.replica_comms.rank != REPLICA:
        return

    def is_on() -> bool:
        return FIRST <= state.step <= LAST

    def flip(step: int) -> None:
        if step == FIRST:
            engine.blocks[len(engine.blocks) // 2].shards[0].view(-1)[0] *= FLIPPED

    inner_step = engine.step
    if fault == "bits":
        trainer.after_step.append(flip)
    elif fault == "rate":
        engine.step = lambda lr: inner_step(lr * RATES if is_on() else lr)
    elif fault == "documents":
        trainer.loader = GarbageLoader(trainer.loader, is_on, trainer.recipe.run.seed)
    elif fault == "gradients":
        for parameter in engine.model.parameters():
            parameter.register_hook(lambda gradient: gradient * GRADIENTS if is_on() else gradient)
    else:
        raise ValueError(f"the fault is {fault!r}, expected one of {', '.join(FAULTS)}")


def main(fault: str, recipe: str, *overrides: str) -> int:
    """Train with a fault, and return the exit code."""
    loaded, world = load_recipe(recipe, overrides), World.from_environment()
    return run_training(loaded, world, lambda trainer: inject(trainer, fault))


if __name__ == "__main__":
    exit_with_status(lambda: sys.exit(main(*sys.argv[1:])))
