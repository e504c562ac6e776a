"""Commands that list, copy and describe recipes. Those that check or show one are in cli.py."""

from __future__ import annotations

from typing import Annotated

import typer

from llmtrain.recipe_files import copy_recipe, list_recipes

recipe_app = typer.Typer(help="List, copy, check or show recipes without running them.", no_args_is_help=True)
recipe_app.command("list")(list_recipes)
recipe_app.command("copy")(copy_recipe)


def _complete_section(beginning: str) -> list[str]:
    from llmtrain.recipe_keys import sections

    return [name for name in sections() if name.startswith(beginning)]


@recipe_app.command("keys")
def recipe_keys(
    section: Annotated[
        str | None,
        typer.Argument(
            metavar="[SECTION]",
            help="A section (optim), a mapping in it (sync.period) or a key (optim.lr); all sections by default.",
            autocompletion=_complete_section,
        ),
    ] = None,
) -> None:
    """List the keys of recipes with their values, defaults and meanings, as docs/recipes.md does."""
    from llmtrain.recipe_keys import groups_at, sections, show_keys

    names = sections() if section is None else [section]
    show_keys([group for name in names for group in groups_at(name)])


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipe files, for editors. recipes/schema.json has it, too."""
    from llmtrain.recipe_schema import schema_text

    typer.echo(schema_text(), nl=False)
