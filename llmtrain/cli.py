"""Command-line interface. Imports are inside the commands, so that `--help` is fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.errors import exit_with_status
from llmtrain.startup import imports_without_gc

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
    """Train a recipe as one rank, or resume it: python -m llmtrain train recipes/quickstart.yaml optim.lr=1e-3

    The rank is read from the environment (torchrun, srun, DeepSpeed). If it has none, this is the only process.
    """
    with imports_without_gc():
        from llmtrain.parallel.world import World
        from llmtrain.recipe_loader import load_recipe
        from llmtrain.train.run import run_training

    raise typer.Exit(run_training(load_recipe(recipe, context.args), World.from_environment()))


@app.command(context_settings=OVERRIDES)
def launch(context: typer.Context, recipe: RecipeFile) -> None:
    """Start torchrun on this machine with the right number of processes (what launch/train.sh does).

    Starts one process per GPU, or on a CPU as many as the recipe's mesh asks for. NPROC_PER_NODE, NNODES, NODE_RANK,
    MASTER_ADDR and MASTER_PORT are used if they are set, or derived from Slurm if srun starts this once per node.
    """
    from llmtrain.launch import launch_torchrun

    raise typer.Exit(launch_torchrun(recipe, context.args))


@app.command(context_settings=OVERRIDES)
def prepare(context: typer.Context, recipe: RecipeFile) -> None:
    """Tokenize a recipe's text into token shards. Training does so itself if they do not exist yet."""
    with imports_without_gc():
        from llmtrain.recipe_check import check
        from llmtrain.recipe_loader import load_recipe
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
    """Look for problems that could make a run fail: python -m llmtrain doctor recipes/quickstart.yaml

    Started on several ranks (torchrun ... -m llmtrain doctor RECIPE), it also tests the network between them. The exit
    code is 1 if there is a problem.
    """
    with imports_without_gc():
        from llmtrain.doctor.run_checks import run_checks
        from llmtrain.parallel.world import World
        from llmtrain.recipe_loader import load_recipe

    loaded = load_recipe(recipe, context.args) if recipe else None
    raise typer.Exit(run_checks(loaded, World.from_environment(), timeout))


@app.command()
def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE [KEY=VALUE]...", help="A comparison, e.g. recipes/compare/sync_vs_async.yaml."),
    ],
    shaping: Annotated[
        bool, typer.Option(help="Virtual hosts with the conditions' limits; without: loopback, no limits, no root.")
    ] = True,
    retry: Annotated[bool, typer.Option("--retry", help="Make failed trials again.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Only report on the run directories given in the place of FILE.")
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="With --report-only: what the others are measured against.")
    ] = None,
    target: Annotated[float | None, typer.Option(help="With --report-only: the validation loss to reach.")] = None,
    out: Annotated[Path, typer.Option(help="With --report-only: where the report goes.")] = Path("runs/report"),
) -> None:
    """Train several recipes under the same conditions, one after another, and report which reached which loss first.

    python -m llmtrain compare recipes/compare/sync_vs_async.yaml creates virtual hosts on this machine (network
    namespaces, with the bandwidths, slow hosts and faults that the file lists). Run again, it continues where it stopped.
    """
    if report_only:
        from llmtrain.compare.report import write_report
        from llmtrain.compare.results import load_trials

        trials = load_trials([Path(directory) for directory in arguments])
        typer.echo(write_report(trials, out, baseline, target))
        return

    from llmtrain.compare.runner import run_comparison

    file, *overrides = arguments
    raise typer.Exit(run_comparison(Path(file), overrides, shaping, retry))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, e.g. runs/quickstart.")],
    step: Annotated[int | None, typer.Option(help="The checkpoint after so many steps; the newest by default.")] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="mean of the replicas, anchor (the last synchronization's result), or replica:K alone. They differ "
            "between synchronizations; after the last one, at a run's end, all are equal."
        ),
    ] = "mean",
    out: Annotated[
        Path | None, typer.Option(help="The folder to write; RUN/export/step-00001000 or the like by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    max_shard_size: Annotated[str | None, typer.Option(help="Of one weights' file; 5GB by default.")] = None,
) -> None:
    """Turn a checkpoint into a folder that transformers loads: python -m llmtrain export runs/quickstart

    Needs one process and no GPU, whatever mesh and engine the run had. The logits of the exported model are compared
    with the training model's. If they differ, the exit code is 1 and no folder is written.
    """
    with imports_without_gc():
        from llmtrain.export.export import Request, describe
        from llmtrain.export.export import export as export_checkpoint
        from llmtrain.export.source import find_source
        from llmtrain.export.weights import WeightSource

    request = Request(WeightSource.parse(weights), dtype, max_shard_size)
    typer.echo(describe(*export_checkpoint(find_source(run, step), request, out)))


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="A run directory, or an exported folder.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    step: Annotated[int | None, typer.Option(help="The checkpoint after so many steps; the newest by default.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Write at most so many tokens.")] = 120,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many of the likeliest tokens; 0: among all.")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
) -> None:
    """Generate text with a trained model: python -m llmtrain generate runs/quickstart --prompt "def "

    A run's checkpoint is first exported to RUN/export, unless that has already been done.
    """
    with imports_without_gc():
        from llmtrain.export.generate import Sampling
        from llmtrain.export.generate import generate as write_text

    typer.echo(write_text(model, prompt, Sampling(tokens, temperature, top_k, seed), step))


@app.command("eval")
def evaluate_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders that transformers loads.")],
    suite: Annotated[str, typer.Option(help="edit_paper, small, tinystories, offline, or a YAML file.")] = "small",
    over_time: Annotated[bool, typer.Option("--over-time", help="Every checkpoint of the runs: curves.")] = False,
    step: Annotated[int | None, typer.Option(help="The checkpoint after this step; else the newest.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many documents of each task.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences at once; else the suite's.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of local data (suites offline, tinystories).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; else a GPU if there is one.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Run or folder to test the others against.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results; else RUN/eval.")] = None,
) -> None:
    """Evaluate checkpoints on a suite of tasks: python -m llmtrain eval runs/edit_1b --suite edit_paper

    Results go to RUN/eval/SUITE.json. Finished parts are kept, so an interrupted evaluation continues.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    with imports_without_gc():
        from llmtrain.eval.command import evaluate

    evaluate(
        runs,
        suite,
        over_time=over_time,
        step=step,
        limit=limit,
        batch_size=batch_size,
        data_dir=data_dir,
        device=device,
        baseline=baseline,
        out=out,
    )


@recipe_app.command("check", context_settings=OVERRIDES)
def recipe_check(
    context: typer.Context,
    recipe: RecipeFile,
    processes: Annotated[int | None, typer.Option(help="Also check the mesh against so many processes.")] = None,
) -> None:
    """Check whether a recipe can be trained."""
    from llmtrain.recipe_check import check
    from llmtrain.recipe_loader import load_recipe

    loaded = load_recipe(recipe, context.args)
    check(loaded, processes)
    typer.echo(f"{recipe}: fine ({loaded.train.total_steps:,} steps of {loaded.train.tokens_per_step:,} tokens)")


@recipe_app.command("show", context_settings=OVERRIDES)
def recipe_show(
    context: typer.Context,
    recipe: RecipeFile,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="What a rank really does in training, in 10^12 operations a second; else tried here."
        ),
    ] = None,
    mbit: Annotated[float, typer.Option(min=1e-6, help="Megabits per second from one replica to another.")] = 1000.0,
) -> None:
    """Show the resolved recipe, its model's size, and the memory and time that it needs."""
    with imports_without_gc():
        from rich.console import Console

        from llmtrain.plan.show import show
        from llmtrain.plan.time_estimate import HardwareRates, rate_here
        from llmtrain.recipe_loader import load_recipe

    loaded = load_recipe(recipe, context.args)
    show(loaded, Console(highlight=False), HardwareRates(tflops * 1e12 if tflops else rate_here(loaded), mbit))


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from llmtrain.config import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code: 0 done, 1 failed, 2 bad recipe or usage, 3 stopped early."""
    exit_with_status(lambda: app(arguments))
