"""Commands that list, copy, describe, check and show recipes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.completion import Overrides, complete_recipe, complete_section
from llmtrain.recipe_files import copy_recipe, find_recipe, find_recipe_or_run, list_recipes, usable_paths
from llmtrain.startup import imports_without_gc

UNKNOWN_OPTIONS = {"ignore_unknown_options": True}
"""Settings of a command with overrides. An unknown option counts as an override; if it is invalid, the recipe loader's message says
what is expected."""
RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's file, or a name in llmtrain recipe list (quickstart).",
        callback=find_recipe,
        autocompletion=complete_recipe,
    ),
]
RecipeOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE|RUN",
        help="A recipe's file or name, or a run's folder.",
        callback=usable_paths,
        autocompletion=complete_recipe,
    ),
]

recipe_app = typer.Typer(help="List, copy, check or show recipes without running them.", no_args_is_help=True)
recipe_app.command("list")(list_recipes)
recipe_app.command("copy")(copy_recipe)


@recipe_app.command("keys")
def recipe_keys(
    section: Annotated[
        str | None,
        typer.Argument(
            metavar="SECTION",
            help="A section (optim), a mapping in it (sync.period) or a key (optim.lr); all sections by default.",
            autocompletion=complete_section,
        ),
    ] = None,
) -> None:
    """List the keys of recipes with their values, defaults and meanings, as docs/recipes.md does."""
    from llmtrain.recipe_keys import key_groups_at, sections, show_keys

    names = sections() if section is None else [section]
    show_keys([group for name in names for group in key_groups_at(name)])


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipe files, for editors. recipes/schema.json has it, too."""
    from llmtrain.recipe_schema import schema_text

    typer.echo(schema_text(), nl=False)


@recipe_app.command("check", context_settings=UNKNOWN_OPTIONS)
def recipe_check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Check for this number of processes elsewhere, such as the GPUs of a cluster."),
    ] = None,
) -> None:
    """Check whether llmtrain launch would train a recipe on this machine, and how, without starting or writing anything.

    Refuses what a start would refuse: keys, mesh, memory, devices, text, tokenizer, the run's folder. Prints the mesh,
    the model, and the memory that a process needs. With --processes, the memory, devices and files of this machine do
    not matter. It then prints the mesh and the memory on each GPU.
    """
    with imports_without_gc():
        from llmtrain.launch.preflight import check_elsewhere, check_here
        from llmtrain.launch.preview import preview, preview_elsewhere
        from llmtrain.recipe_loader import check_not_moved, load_recipe

    loaded = load_recipe(recipe, overrides or ())
    check_not_moved(loaded, recipe, overrides or ())
    if processes is None:
        lines = preview(recipe, loaded, check_here(loaded))
    else:
        lines = preview_elsewhere(recipe, loaded, processes, check_elsewhere(loaded, processes))
    for line in lines:
        typer.echo(line)


@recipe_app.command("show", context_settings=UNKNOWN_OPTIONS)
def recipe_show(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Card of each rank: h100, h200, a100, l40s, ...; this machine by default.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Rate that a rank reaches in training, in TFLOP/s; the card's or measured by default."
        ),
    ] = None,
    mbit: Annotated[
        float,
        typer.Option(min=1e-6, help="Bandwidth of a replica's link to the others, all its ranks together, in Mbit/s."),
    ] = 1000.0,
    latency_ms: Annotated[float, typer.Option(min=0, help="One-way latency between two replicas, in ms.")] = 0.0,
    methods: Annotated[
        bool, typer.Option("--methods", help="Show instead how long this recipe would wait with each method.")
    ] = False,
) -> None:
    """Show the resolved recipe, its model's size, and the memory and time that it needs."""
    with imports_without_gc():
        from rich.console import Console

        from llmtrain.plan.hardware import hardware_of
        from llmtrain.plan.method_table import show_methods
        from llmtrain.plan.show import show_plan
        from llmtrain.recipe_loader import load_recipe

    loaded, console = load_recipe(recipe, overrides or ()), Console(highlight=False)
    hardware = hardware_of(loaded, gpu, tflops, mbit, latency_ms)
    if methods:
        show_methods(loaded, partial(load_recipe, recipe, overrides or ()), console, hardware)
    else:
        show_plan(loaded, console, hardware)


@recipe_app.command("diff")
def recipe_diff(first: RecipeOrRun, second: RecipeOrRun) -> None:
    """Show the keys in which two recipes or runs differ, with the values of both, after base files and presets."""
    with imports_without_gc():
        from llmtrain.console_table import console_for_output
        from llmtrain.recipe_diff import differing_values, show_differences
        from llmtrain.recipe_loader import load_recipe

    found = differing_values(*(load_recipe(find_recipe_or_run(given)) for given in (first, second)))
    show_differences(found, str(first), str(second), console_for_output())
