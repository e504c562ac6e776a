"""Differences between two recipes, key by key: for `llmtrain recipe diff`, and for runs that continue with a changed recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from llmtrain.config import Recipe
from llmtrain.config.section import leaves
from llmtrain.console_table import output_table

NOT_GIVEN = "not given"


def differing_values(first: Recipe, second: Recipe, ignore: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
    """Return the keys whose values differ, with both values as JSON. `ignore` holds dotted keys or sections."""
    left, right = leaves(first.model_dump(mode="json")), leaves(second.model_dump(mode="json"))
    ignored = tuple(ignore)
    keys = [key for key in {**left, **right} if not any(key == i or key.startswith(i + ".") for i in ignored)]
    return {key: (_value(left, key), _value(right, key)) for key in keys if left.get(key, ...) != right.get(key, ...)}


def differences(there: Recipe, here: Recipe, ignore: Iterable[str] = ()) -> list[str]:
    """Return a line such as `optim.lr: 0.001 there, 0.002 here` for each key that differs."""
    return [f"{key}: {a} there, {b} here" for key, (a, b) in differing_values(there, here, ignore).items()]


def show_differences(found: Mapping[str, tuple[str, str]], first: str, second: str, console: Console) -> None:
    """Print a table of the differing values, with one column per recipe. `first` and `second` are the recipes' names."""
    if not found:
        console.print("The recipes do not differ.")
        return
    table = output_table(console)
    for head in ("key", first, second):
        table.add_column(Text(head), overflow="fold", no_wrap=head == "key")
    for key, values in found.items():
        table.add_row(key, *map(Text, values))
    console.print(table)


def _value(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else NOT_GIVEN
