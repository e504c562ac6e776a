"""The commands. Each reads a recipe and calls one function; imports are inside, so that `--help` is quick."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.errors import BAD_USAGE, FAILED, TrainingError, UserError

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, e.g. recipes/quickstart.yaml.")]

app = typer.Typer(
    help="Pretrain language models across slow or uneven networks. Any key of a recipe can be overridden: a.b=c.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(help="Look at recipes without running them.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    recipe: RecipeFile,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Train a recipe as this rank, or continue it: python -m llmtrain train recipes/quickstart.yaml optim.lr=1e-3

    Ranks come from the environment (torchrun, srun, DeepSpeed); without one, this is the only process.
    """
    from llmtrain.parallel.world import World
    from llmtrain.recipe import load_recipe
    from llmtrain.train.run import run_training

    raise typer.Exit(run_training(load_recipe(recipe, context.args), World.from_environment()))


@app.command(context_settings=OVERRIDES)
def launch(context: typer.Context, recipe: RecipeFile) -> None:
    """Start torchrun on this machine with the right number of processes (what launch/train.sh does).

    One process a GPU, or as many as the recipe's mesh asks for on a CPU. NPROC_PER_NODE, NNODES, NODE_RANK,
    MASTER_ADDR and MASTER_PORT are used where they are set, or found from Slurm when srun starts it once a node.
    """
    from llmtrain.launch import launch_torchrun

    raise typer.Exit(launch_torchrun(recipe, context.args))


@app.command(context_settings=OVERRIDES)
def prepare(context: typer.Context, recipe: RecipeFile) -> None:
    """Turn a recipe's text into token shards; training does it too, if they are not there yet."""
    from llmtrain.recipe import load_recipe
    from llmtrain.recipe_check import check
    from llmtrain.train.run import prepare_for

    loaded = load_recipe(recipe, context.args)
    check(loaded, None)
    prepared = prepare_for(loaded, show_progress=True)
    counts = ", ".join(f"{len(prepared.tokens(split)):,} {split} tokens" for split in ("train", "validation"))
    typer.echo(f"{prepared.directory}: {counts}, vocabulary {prepared.vocab_size:,}")


@app.command(context_settings=OVERRIDES)
def doctor(
    context: typer.Context,
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Also check whether this recipe fits.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for other ranks, each time.")] = 60.0,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Look for what could keep a run from working: python -m llmtrain doctor recipes/quickstart.yaml

    Started on many ranks (torchrun ... -m llmtrain doctor RECIPE), it also tries the network between them. Exit code 1
    if there is a problem.
    """
    from llmtrain.doctor.examine import examine
    from llmtrain.parallel.world import World
    from llmtrain.recipe import load_recipe

    loaded = load_recipe(recipe, context.args) if recipe else None
    raise typer.Exit(examine(loaded, World.from_environment(), timeout))


@recipe_app.command("check", context_settings=OVERRIDES)
def recipe_check(
    context: typer.Context,
    recipe: RecipeFile,
    processes: Annotated[int | None, typer.Option(help="Also check the mesh against so many processes.")] = None,
) -> None:
    """Say whether a recipe can be trained."""
    from llmtrain.recipe import load_recipe
    from llmtrain.recipe_check import check

    loaded = load_recipe(recipe, context.args)
    check(loaded, processes)
    typer.echo(f"{recipe}: fine ({loaded.train.total_steps:,} steps of {loaded.train.tokens_per_step:,} tokens)")


@recipe_app.command("show", context_settings=OVERRIDES)
def recipe_show(context: typer.Context, recipe: RecipeFile) -> None:
    """The resolved recipe, its model's size, and what it needs on a GPU."""
    from rich.console import Console

    from llmtrain.plan.show import show
    from llmtrain.recipe import load_recipe

    show(load_recipe(recipe, context.args), Console(highlight=False))


@recipe_app.command("schema")
def recipe_schema() -> None:
    """The JSON schema of recipes, for editors."""
    from llmtrain.config import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code: 0 done, 1 failed, 2 bad recipe or usage, 3 stopped early."""
    try:
        app(arguments)
    except UserError as error:
        if _speaks_for_its_host():  # all ranks find the same fault in a recipe
            print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_USAGE)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)


def _speaks_for_its_host() -> bool:
    """Whether this is the first rank of its host, by whichever launcher."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", "RANK")
    return next((os.environ[name] for name in names if os.environ.get(name)), "0") == "0"
