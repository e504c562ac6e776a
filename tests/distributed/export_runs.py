"""Short runs on the ranks of the pool that leave whole run directories, to be exported."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config import Recipe
from llmtrain.data.dataset import TokenDataset
from llmtrain.parallel.mesh import Mesh
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.build_trainer import OpenRun, build_trainer
from llmtrain.train.loggers import Console
from llmtrain.train.mirror import Mirror
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.signals import StopRequest
from tests.distributed.real_engine import mesh_of
from tests.end_to_end.runs import ROOT, TINY

MODELS = {
    "llama": [key for key in TINY if key.startswith("model.")],
    "gpt_neo": [
        "model.type=gpt_neo",
        "model.config.attention_types=[[[global, local], 1]]",
        *(f"model.config.{key}" for key in ("hidden_size=32", "num_layers=2", "num_heads=2", "window_size=4")),
    ],
}
IN_A_ROUND, LAST = 4, 5
"""Steps of a run's two checkpoints. After two synchronous steps comes a round, which the end of the run cuts short."""


@dataclass(frozen=True)
class ExportRun:
    """Choices in which the runs differ. Most runs use DiLoCo, which has an anchor, and replicas that differ within a round."""

    model: str = "llama"
    tied: bool = False
    engine: str = "fsdp2"
    replicas: int = 2
    shard: int = 2
    method: str = "diloco"

    def __str__(self) -> str:
        method = "" if self.method == "diloco" else f"{self.method}-"
        return f"{method}{self.model}-{'tied' if self.tied else 'untied'}-{self.engine}-{self.replicas}x{self.shard}"

    def recipe(self, folder: Path) -> Recipe:
        """Return the run's recipe, with everything that it reads and writes below `folder`."""
        text, base = folder / "text.txt", folder / "base.yaml"
        if not text.exists():
            write_text(text)
            base.write_text("train: {steps: 5}\n")
        zero = self.engine.startswith("zero")
        return load_recipe(
            base,
            [
                *(key for key in TINY if not key.startswith("model.")),
                *MODELS[self.model],
                f"model.config.tie_word_embeddings={str(self.tied).lower()}",
                "model.config.max_position_embeddings=64",
                *(f"run.name={self}", f"run.out_dir={folder}/runs", f"data.cache_dir={folder}/data"),
                *(f"data.source={text}", "data.tokenizer=train:400", "data.validation_fraction=0.2"),
                *(f"train.steps={LAST}", f"checkpoint.every={IN_A_ROUND}", f"eval.every={IN_A_ROUND}"),
                *(
                    "eval.tokens=512",
                    "train.micro_batch=4",
                    "optim.lr=1e-2",
                    "log.tensorboard=false",
                    "parallel.precision=fp32",
                ),
                *(f"sync.method={self.method}", "sync.warmup_steps=2"),
                *(f"parallel.replicas={self.replicas}", f"parallel.shards={self.shard}"),
                *(["parallel.engine=zero", f"parallel.zero_stage={self.engine[-1]}"] if zero else []),
            ],
        )


def write_text(path: Path) -> None:
    """Write stories of random words."""
    rng, words = random.Random(0), (ROOT / "README.md").read_text().split()
    stories = (" ".join(rng.choices(words, k=rng.randrange(20, 80))) for _ in range(300))
    path.write_text("\n<|endoftext|>\n".join(stories))


def open_run(recipe: Recipe, mesh: Mesh, texts: Mapping[str, TokenDataset], console: Console | None = None) -> OpenRun:
    """Return a run without background evaluation, in the form that `build_trainer` takes."""
    directory, console, stop = RunDirectory(recipe), console or Console(enabled=False), StopRequest()
    return OpenRun(
        recipe=recipe,
        directory=directory,
        console=console,
        mirror=Mirror(recipe, directory, console.print, mesh.is_main),
        texts=texts,
        train_text=None,
        mesh=mesh,
        mesh_reason="of a test",
        stop=stop,
        background_eval=BackgroundEval(None, recipe, directory, console, stop),
        at_end=ExitStack(),
    )


def make_run(recipe: Recipe) -> None:
    """Train the recipe's run on this rank, from the preparation of its data to its last checkpoint."""
    mesh = mesh_of(recipe.parallel.replicas, recipe.parallel.shards)
    mesh.broadcast_from_main(RunDirectory(recipe).claim)
    build_trainer(open_run(recipe, mesh, prepare_texts(recipe, show_progress=False)), None).fit()
