"""Parts of runs on the ranks of the pool, each part on a mesh of its own, with the real trainer and checkpoints."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from llmtrain.config import CheckpointSection, Recipe
from llmtrain.errors import CheckpointError
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from llmtrain.run_files import complete_checkpoints
from llmtrain.train.build_trainer import build_trainer
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.loggers import Console
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.trainer import Trainer
from llmtrain.train.validation import validated_parameters
from tests.distributed.export_runs import open_run
from tests.distributed.fake_engine import meeting_store
from tests.distributed.real_engine import mesh_of
from tests.end_to_end.runs import RECIPE, ROOT, TINY

SMALL = [
    *("model.config.hidden_size=16", "model.config.intermediate_size=24", "model.config.num_hidden_layers=1"),
    *(
        "parallel.precision=fp64",
        "data.tokenizer=train:400",
        "train.global_batch=12",
        "eval.every=null",
        "eval.tokens=500",
    ),
    *("eval.sample_prompt=null", "log.tensorboard=false", "checkpoint.keep=9"),
]


@dataclass(frozen=True)
class Part:
    """Part of a run, from its newest checkpoint to the one that is written after step `until`."""

    recipe: Recipe
    replicas: int
    shard: int
    until: int
    seconds: tuple[float, ...] = ()
    """Seconds per step of each replica, if rounds are of seconds."""
    device: str = "cpu"


@dataclass
class Seen:
    """Observations of one rank during a part."""

    samples: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    """Loss of the replicas' mean before the first step and after the last."""


def write_texts(folder: Path) -> None:
    """Write a little real text: some sources of the standard library."""
    texts = {"train": ("this", "bisect", "heapq", "textwrap", "queue", "shlex"), "validation": ("sched", "stat")}
    for split, names in texts.items():
        (folder / split).mkdir()
        for name in names:
            source = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
            (folder / split / f"{name}.txt").write_text(source.read_text())


def recipe_of(folder: Path, name: str, *overrides: str) -> Recipe:
    """Return a tiny recipe whose runs and data are in `folder`, which has texts in `train/` and `validation/`."""
    texts = [f"data.source={folder / 'train'}", f"data.validation={folder / 'validation'}"]
    where = [*texts, f"run.name={name}", f"run.out_dir={folder / 'runs'}", f"data.cache_dir={folder / 'data'}"]
    return load_recipe(ROOT / RECIPE, [*TINY, *SMALL, *where, *overrides])


class _Watching(Console):
    """Console that keeps the notes, and validates when training begins."""

    def __init__(self, seen: Seen):
        super().__init__(enabled=False)
        self.seen, self.trainer = seen, None

    def start(self, step: int, total: int, rounds: int | None) -> None:
        super().start(step, total, rounds)
        self.seen.validation.append(loss_of_mean(self.trainer))

    def print(self, text: str) -> None:
        self.seen.notes.append(text)


def loss_of_mean(trainer: Trainer) -> float:
    """Return the validation loss of the replicas' mean."""
    with validated_parameters(trainer.engine, trainer.metrics.mesh):
        return trainer.validator.losses_of(trainer.validator.sets[0])[0][1].loss


def trainer_of(part: Part, seen: Seen) -> Trainer:
    """Return the trainer of a part on this rank. It stops at its next checkpoint."""
    directory = RunDirectory(part.recipe)
    # Ranks agree on a request to stop at a log line: the one after the first step, or the one at the checkpoint.
    log = part.until if complete_checkpoints(directory.checkpoints) else part.recipe.train.total_steps
    checkpoint = part.recipe.checkpoint.model_copy(update={"every": part.until})
    # One micro-batch per rank, whose size depends on the mesh. With shares, it is that of the replica that reads least.
    shares = part.recipe.train.batch_shares or (1,) * part.replicas
    smallest = part.recipe.train.global_batch * min(shares) // sum(shares)
    train = part.recipe.train.model_copy(update={"micro_batch": smallest // part.shard})
    update = {"checkpoint": checkpoint, "log": part.recipe.log.model_copy(update={"every": log}), "train": train}
    recipe = part.recipe.model_copy(update=update)
    check(recipe, part.replicas * part.shard)
    mesh = mesh_of(part.replicas, part.shard, part.device)
    if recipe.sync.schedule.kind == "wait_avoiding" and part.replicas > 1:
        mesh = replace(mesh, store=meeting_store())
    console = _Watching(seen)
    texts = prepare_texts(recipe, show_progress=False, replicas=[mesh.replica_comms.rank])
    run = open_run(recipe, mesh, texts, console)
    run.directory.check_recipe()
    if mesh.is_main:
        run.directory.claim()
    run.stop.requested = True
    trainer = build_trainer(run, None)
    console.trainer = trainer
    trainer.loader = trainer.loader.loader  # samples that are only read ahead must not be recorded
    tokens, following = trainer.loader.tokens, trainer.loader.next
    window = tokens.window

    def recorded(start: int, length: int) -> np.ndarray:
        seen.samples.append(start // recipe.train.sequence_length)
        return window(start, length)

    tokens.window = recorded
    if part.seconds:
        steps = 0

        def counted() -> list[torch.Tensor]:
            nonlocal steps
            steps += 1
            return following()

        trainer.loader.next = counted
        trainer.method.period.clock = lambda: steps * part.seconds[mesh.replica_comms.rank]
    return trainer


def newest_of(trainer: Trainer) -> Path | None:
    """Return the run's newest checkpoint, if it has one."""
    return max(complete_checkpoints(trainer.metrics.run_log.directory.checkpoints).values(), default=None)


def fit(trainer: Trainer) -> str:
    """Train from the run's newest checkpoint on, and return how training ended."""
    if (newest := newest_of(trainer)) is not None:
        trainer.load(newest)
    return trainer.fit()


def run_part(part: Part) -> Seen:
    """Run a part on this rank."""
    torch.manual_seed(0)
    seen = Seen()
    trainer = trainer_of(part, seen)
    fit(trainer)
    seen.validation.append(loss_of_mean(trainer))
    return seen


def run_parts(parts: list[Part]) -> list[Seen]:
    """Run parts of different runs on one mesh, one after another."""
    return [run_part(part) for part in parts]


def rewrite(parts: list[tuple[Part, Path]]) -> list[str]:
    """Load the newest checkpoint of each part's run on the part's mesh, and write the loaded state to a folder. Return the console
    texts that say how the states were resharded."""
    said = []
    for part, folder in parts:
        trainer = trainer_of(part, Seen())
        loaded = trainer.checkpointer.load(newest_of(trainer), trainer.reshard_rules(), part.recipe.run.seed)
        mesh = trainer.metrics.mesh
        rewritten = Checkpointer(folder, mesh, trainer.engine, trainer.method, CheckpointSection(), 60.0)
        rewritten.save(loaded.step, lambda progress=loaded.progress: progress)
        rewritten.wait()
        trainer.method.close()
        said.append(loaded.how)
    return said


def refusal(part: Part) -> str:
    """Return why this rank does not load the newest checkpoint; empty if it does."""
    trainer = trainer_of(part, Seen())
    try:
        trainer.checkpointer.load(newest_of(trainer), trainer.reshard_rules(), part.recipe.run.seed)
    except CheckpointError as error:
        return str(error)
    finally:
        trainer.method.close()
    return ""
