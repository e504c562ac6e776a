"""Command-line interface. Imports are inside the commands, so that `--help` is fast."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import llmtrain
from llmtrain.completion import Overrides, complete_recipe
from llmtrain.errors import STOPPED_EARLY, ResultsError, UserError, exit_with_status, leave, reason
from llmtrain.recipe_commands import UNKNOWN_OPTIONS, RecipeFile, recipe_app
from llmtrain.recipe_files import find_recipe, usable_arguments, usable_paths
from llmtrain.startup import import_transformers, imports_without_gc, single_threaded_imports
from llmtrain.usage_errors import run_app

StepOption = Annotated[
    str | None,
    typer.Option(help="Step of the checkpoint, or best: the lowest validation loss; the newest by default."),
]
path_option = partial(typer.Option, callback=usable_paths)
path_argument = partial(typer.Argument, callback=usable_paths)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(recipe_app, name="recipe")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"llmtrain {llmtrain.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Pretrain language models across slow or uneven networks. Any key of a recipe can be overridden: a.b=c.

    First: llmtrain launch quickstart; then llmtrain runs. All recipes: llmtrain recipe list. All keys: llmtrain recipe keys.
    """


@app.command(context_settings=UNKNOWN_OPTIONS)
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Train a recipe as one rank, or resume it, for torchrun, srun and DeepSpeed. `llmtrain launch` starts all ranks itself.

    The rank is read from the environment. If it has none, this is the only process. It holds one replica, or all of them
    with parallel.in_process=true.
    """
    with imports_without_gc():
        import_transformers()
        from llmtrain.parallel.world import World
        from llmtrain.recipe_loader import check_not_moved, load_recipe
        from llmtrain.train.output import outlive_readers
        from llmtrain.train.run import run_training
        from llmtrain.train.signals import stop_without_torchrun

    outlive_readers()
    stop_without_torchrun()
    loaded = load_recipe(recipe, overrides or ())
    check_not_moved(loaded, recipe, overrides or ())
    leave(run_training(loaded, World.from_environment()))


@app.command(context_settings=UNKNOWN_OPTIONS)
def launch(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Train a recipe with the processes that it needs, as launch/train.sh does: llmtrain launch quickstart run.name=mine

    Ctrl-C stops with a checkpoint, and the same command continues. Files are in runs/NAME (run.out_dir, run.name).

    Starts one process per GPU, or on a CPU as many as the recipe's mesh needs. NPROC_PER_NODE, NNODES, NODE_RANK,
    MASTER_ADDR and MASTER_PORT are used if they are set, or derived from Slurm if srun starts this once per node.
    """
    with single_threaded_imports():  # numpy's
        from llmtrain.launch.torchrun import launch_torchrun

    raise typer.Exit(launch_torchrun(recipe, overrides or []))


@app.command(context_settings=UNKNOWN_OPTIONS)
def prepare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    export_to: Annotated[
        Path | None,
        path_option("--export", metavar="FOLDER", help="Also write the tokens for other tools to a folder."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="Needed by --export: nanogpt, llm.c, megatron or npy.")
    ] = None,
) -> None:
    """Tokenize a recipe's text into token shards. Training does so itself if they do not exist yet.

    Ctrl-C ends it with exit code 3. It keeps the tokens that are written, and the same command continues.
    llmtrain prepare RECIPE --export FOLDER --format megatron writes the tokens in the format of another tool.
    """
    if kind is not None and export_to is None:
        raise UserError("--format is for --export; add --export FOLDER, or leave it out")
    with imports_without_gc():
        from llmtrain.export.token_export import describe_token_export, export_tokens, parse_kind, token_destination
        from llmtrain.recipe_check import check
        from llmtrain.recipe_loader import load_recipe
        from llmtrain.train.prepare_data import describe_kept_texts, prepare_texts

    chosen = parse_kind(kind, export_to) if export_to is not None else None
    loaded = load_recipe(recipe, overrides or ())
    check(loaded, None)
    if export_to is not None:
        if loaded.data.is_list:
            raise UserError("--export writes the tokens of one text; give it as data.source=TEXT")
        export_to = token_destination(export_to, loaded.data)
    try:
        texts = prepare_texts(loaded, show_progress=True)
    except KeyboardInterrupt:
        typer.echo(f"stopped: {describe_kept_texts(loaded.data)}; run the same command to continue")
        raise typer.Exit(STOPPED_EARLY) from None
    for prepared in texts.values():
        counts = ", ".join(f"{len(prepared.tokens(split)):,} {split} tokens" for split in ("train", "validation"))
        typer.echo(f"{prepared.directory}: {counts}, vocabulary {prepared.vocab_size:,}")
        if export_to is not None and chosen is not None:
            typer.echo(describe_token_export(export_to, export_tokens(prepared, loaded.data, chosen, export_to)))


@app.command(context_settings=UNKNOWN_OPTIONS)
def doctor(
    recipe: Annotated[
        Path | None,
        path_argument(
            metavar="RECIPE",
            help="A recipe's file or name, to check whether it fits, too.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=86_400, help="Timeout of each wait for other ranks, in seconds.")
    ] = 60.0,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Look for problems that could make a run fail: llmtrain doctor recipes/quickstart.yaml

    Started on several ranks (torchrun ... -m llmtrain doctor RECIPE), it also tests the network between them. The exit
    code is 1 if there is a problem.
    """
    with imports_without_gc():
        from llmtrain.doctor.run_checks import run_checks
        from llmtrain.parallel.world import World
        from llmtrain.recipe_loader import load_recipe

    loaded = load_recipe(find_recipe(recipe), overrides or ()) if recipe else None
    raise typer.Exit(run_checks(loaded, World.from_environment(), timeout))


@app.command()
def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE [KEY=VALUE]... | RUN...",
            help="A comparison file, or folders of runs.",
            callback=usable_arguments,
        ),
    ],
    shaping: Annotated[
        bool,
        typer.Option(help="Create virtual hosts with the conditions' limits; else loopback, without limits or root."),
    ] = True,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed trials.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write a full report on given runs: time, tokens and bytes to a loss.")
    ] = False,
    baseline: Annotated[
        str | None, typer.Option(help="In a report on given runs, the run that others are compared with.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="In a report on given runs, the loss to reach; by default the baseline's last.")
    ] = None,
    out: Annotated[
        Path | None, path_option(help="Folder of the report or picture on given runs; runs/report by default.")
    ] = None,
) -> None:
    """Train several recipes under the same conditions, one after another, and report which reaches a loss first.

    llmtrain compare recipes/compare/sync_vs_async.yaml creates virtual hosts on this machine (network
    namespaces, with the bandwidths, slow hosts and faults that the file lists). Run again, it continues where it stopped.
    llmtrain compare runs/a runs/b shows the losses of given runs in a table and a picture; with --report, --baseline or
    --target, it writes the same report on them as on a comparison.
    """
    from llmtrain.compare.runs import REPORT, are_runs, compare_runs

    wants_report = report or baseline is not None or target is not None
    is_of_runs = are_runs(arguments)
    if is_of_runs and (retry or not shaping):
        raise UserError("--retry and --no-shaping are for the trials of a comparison file; give one, or leave them out")
    if is_of_runs and wants_report:
        typer.echo(_write_report(list(map(Path, arguments)), baseline, target, out or REPORT))
        return
    if is_of_runs:
        compare_runs(list(map(Path, arguments)), out or REPORT)
        return
    if wants_report or out is not None:
        raise UserError(
            "--report, --baseline, --target and --out are for given runs, and these are none; a comparison file has the "
            "keys baseline, target.loss and out_dir instead"
        )
    from llmtrain.compare.runner import run_comparison
    from llmtrain.train.output import outlive_readers

    outlive_readers()
    file, *overrides = arguments
    raise typer.Exit(run_comparison(find_recipe(Path(file)), overrides, shaping, retry))


def _write_report(runs: Sequence[Path], baseline: str | None, target: float | None, out: Path) -> str:
    """Write a report on given runs to `out`, and return what to print: its path, and a warning if there is one."""
    if target is not None and not 0 < target < math.inf:  # false for NaN, too
        raise UserError(f"--target is {target:g}; give a finite loss above 0")
    with imports_without_gc():
        from llmtrain.compare.measures import gather
        from llmtrain.compare.report import write_report
        from llmtrain.compare.results import load_trials

    results = gather(load_trials(runs), baseline, target)
    note = f"\nwarning: {results.unit.note}" if results.unit.note else ""
    try:
        return f"{write_report(results, out)}{note}"
    except OSError as error:
        raise ResultsError(f"{out} can't be written ({reason(error)}); choose another --out") from None


@app.command()
def runs(
    folder: Annotated[Path, path_argument(metavar="FOLDER", help="Folder of run directories.")] = Path("runs"),
    in_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of all fields, not a table.")] = False,
) -> None:
    """List the runs in a folder, the newest last: method, steps, losses, state, size and time since the last output.

    The state is done, running, stopped (by a signal, with a checkpoint) or failed.
    """
    from llmtrain.console_table import console_for_output
    from llmtrain.run_list import as_json, find_runs, show_runs

    rows = find_runs(folder)
    if in_json:
        typer.echo(as_json(rows))
    elif rows:
        show_runs(rows, console_for_output())
    else:
        typer.echo(f"{folder}: no runs yet")


@app.command()
def export(
    run: Annotated[Path, path_argument(metavar="RUN", help="A run directory, e.g. runs/quickstart.")],
    step: StepOption = None,
    weights: Annotated[
        str,
        typer.Option(
            help="mean of the replicas, anchor (result of the last synchronization), or replica:K. At the end of a run "
            "all are equal."
        ),
    ] = "mean",
    out: Annotated[
        Path | None,
        path_option(help="Folder to write; by default RUN/export/step-00001000 for step 1000."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    max_shard_size: Annotated[
        str | None, typer.Option(help="Maximum size of a file of weights; 5GB by default.")
    ] = None,
) -> None:
    """Turn a checkpoint into a folder that transformers loads: llmtrain export runs/quickstart

    Needs one process and no GPU, whatever mesh and engine the run had. The logits of the exported model are compared
    with the training model's. If they differ, the exit code is 1 and no folder is written.
    """
    from llmtrain.export.request import Request, WeightSource, choose_step, parse_step

    request = Request(WeightSource.parse(weights), dtype, max_shard_size)
    checkpoint = choose_step(run, parse_step(step))
    with imports_without_gc():
        from llmtrain.export.export import describe_export
        from llmtrain.export.export import export as export_checkpoint
        from llmtrain.export.source import find_source

    typer.echo(describe_export(*export_checkpoint(find_source(run, checkpoint), request, out)))


@app.command()
def generate(
    model: Annotated[
        Path,
        path_argument(metavar="RUN|FOLDER", help="A run directory, or an exported folder."),
    ],
    prompt: Annotated[str, typer.Option(help="Beginning of the text; by default, the model begins a document.")] = "",
    step: StepOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to write.")] = 120,
    temperature: Annotated[
        float, typer.Option(min=0, max=1000, help="Sampling temperature; 0: always the likeliest token.")
    ] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Number of likeliest tokens to draw from; 0: all.")] = 40,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed; the same seed draws the same text.")
    ] = 0,
) -> None:
    """Generate text with a trained model: llmtrain generate runs/quickstart --prompt "Once upon a time"

    A run's checkpoint is first exported to RUN/export, unless that has already been done.
    """
    from llmtrain.eval.evaluated_checkpoint import check_model_path
    from llmtrain.export.request import parse_step

    chosen = parse_step(step)
    check_model_path(model, chosen)
    with imports_without_gc():
        from llmtrain.eval.texts import generate as write_text

    text = write_text(model, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, step=chosen)
    typer.echo(text)


@app.command("eval")
def evaluate_command(
    runs: Annotated[
        list[Path],
        path_argument(metavar="RUN", help="Runs, or folders that transformers loads."),
    ],
    suite: Annotated[str, path_option(help="edit_paper, small, tinystories, offline, or a YAML file.")] = "small",
    over_time: Annotated[
        bool, typer.Option("--over-time", help="Evaluate every checkpoint of the runs, and draw curves.")
    ] = False,
    step: StepOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of documents per task; the suite's by default.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per batch; the suite's by default.")] = None,
    data_dir: Annotated[
        Path | None,
        path_option(help="Folder of local data, which the suites offline and tinystories need (eval/README.md)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU by default if there is one.")
    ] = None,
    baseline: Annotated[Path | None, path_option(help="Run or folder to test the others against, if any.")] = None,
    out: Annotated[Path | None, path_option(help="Folder of the results; RUN/eval by default.")] = None,
) -> None:
    """Evaluate checkpoints on a suite of tasks: llmtrain eval runs/quickstart --suite small

    Results go to RUN/eval/SUITE.json. Finished parts are kept, so an interrupted evaluation continues.
    """
    from llmtrain.eval.arguments import check_arguments
    from llmtrain.export.request import parse_step
    from llmtrain.train.signals import stop_without_run

    stop_without_run()
    asked = {
        "over_time": over_time,
        "step": parse_step(step),
        "data_dir": data_dir,
        "device": device,
        "baseline": baseline,
        "out": out,
    }
    check_arguments(runs, suite, **asked)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    with imports_without_gc():
        from llmtrain.eval.command import evaluate

    evaluate(runs, suite, limit=limit, batch_size=batch_size, **asked)


for _command in (*app.registered_commands, *recipe_app.registered_commands):  # else the source's line breaks are shown
    _paragraphs = inspect.cleandoc(_command.callback.__doc__ or "").split("\n\n")
    _command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code: 0 done, 1 failed, 2 bad recipe or usage, 3 stopped early."""
    exit_with_status(lambda: run_app(app, arguments))
