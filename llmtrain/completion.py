"""Shell completion of the names, sections and keys of recipes, after `llmtrain --install-completion`. Imports no torch."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated

import typer

from llmtrain.recipe_files import recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    """Return the names of the package's recipes that begin with `incomplete`. If there is none, the shell completes paths."""
    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_section(incomplete: str) -> list[str]:
    """Return the sections of a recipe whose names begin with `incomplete`."""
    from llmtrain.recipe_keys import sections

    return [name for name in sections() if name.startswith(incomplete)]


def complete_override(context: typer.Context, incomplete: str) -> list[str]:
    """Return the recipe keys that begin with `incomplete`, as `a.b=`. If only one key is left, return it with each word
    that it accepts, or with its default, as `a.b=c`. bash splits words at `=`, so for bash only the values are returned."""
    before = list(context.params.get("overrides") or ())
    if before[-1:] == ["="]:  # bash, with a part of the value
        return [value for value in _values().get(before[-2], ()) if value.startswith(incomplete)]
    if incomplete == "=":  # bash, without a part of the value
        return list(_values().get(before[-1], ())) if before else []
    name, equals, beginning = incomplete.partition("=")
    if equals:
        return [f"{name}={value}" for value in _values().get(name, ()) if value.startswith(beginning)]
    keys = [key for key in _values() if key.startswith(name)]
    if len(keys) != 1:
        return [f"{key}=" for key in keys]
    values = _values()[keys[0]]
    # If there are several values, a shell inserts their common prefix without a space after it.
    return [f"{keys[0]}={value}" for value in (values if len(values) > 1 else ("", *values))]


@cache
def _values() -> dict[str, tuple[str, ...]]:
    """Return, for each key, the words that it accepts, or its default if it accepts no list of words and the default is
    a single word. Keys of list items are left out, because they can't be set one by one."""
    from llmtrain.recipe_keys import key_groups, sections
    from llmtrain.sync.methods import METHODS

    groups = [group for section in sections() for group in key_groups(section)]
    lists = {f"{group.path}.{key.name}" for group in groups for key in group.keys if key.values.startswith("[")}
    found = {"sync.method": tuple(METHODS)}
    for group in groups:
        for key in group.keys if group.path not in lists else ():
            name, default = f"{group.path}.{key.name}", re.findall(r"^`([^\s{}\[\]]+)`$", key.default)
            words = [] if "matching" in key.values else re.findall(r"`([\w.-]+)`", key.values)
            known = found.get(name, ())
            found[name] = tuple(dict.fromkeys([*known, *(words if len(words) > 1 else default)]))
    return found


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Keys of the recipe to change: optim.lr=1e-3", autocompletion=complete_override
    ),
]
"""Argument for the overrides that follow the recipe in a command."""
