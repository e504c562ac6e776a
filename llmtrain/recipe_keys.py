"""Reference of the recipe keys: allowed values, default and meaning of each key, read from the schema.

docs/recipes.md and the output of `recipe keys` are made from it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmtrain.config import Recipe
from llmtrain.errors import RecipeError
from llmtrain.recipe_messages import closest
from llmtrain.sync.methods import METHODS

WORDS = {"string": "text", "boolean": "`true` or `false`", "null": "`null`", "object": "mapping"}
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
PRESET_KEYS = tuple(dict.fromkeys(key for method in METHODS.values() for key in method.PRESET))
"""Keys of `sync` whose default depends on the method."""


PLAIN_WIDTH = 160
"""Width of the output of `recipe keys` in characters if it is not a terminal."""


@dataclass(frozen=True)
class KeyReference:
    """Description of one key. The texts are Markdown."""

    name: str
    values: str
    default: str
    """Empty if the key has no default."""
    meaning: str

    @property
    def first_sentence(self) -> str:
        """Beginning of the meaning, up to the first period that ends a sentence."""
        return re.split(r"(?<=\.)\s", " ".join(self.meaning.split()), maxsplit=1)[0]


@dataclass(frozen=True)
class KeyGroup:
    """The keys of a section, or of a mapping in it. A mapping with several kinds has one group per kind."""

    path: str
    """Dotted path of the mapping."""
    kind: str | None
    description: str
    keys: tuple[KeyReference, ...]

    @property
    def title(self) -> str:
        return f"{self.path}: {{kind: {self.kind}}}" if self.kind else self.path


def sections() -> list[str]:
    """Return the names of the sections, in the order of a recipe."""
    return list(Recipe.model_fields)


@cache
def key_groups(section: str) -> tuple[KeyGroup, ...]:
    """Return the group of a section, then the groups of the mappings in it."""
    schema = Recipe.model_json_schema()
    return tuple(_groups(section, schema["properties"][section], schema))


def key_groups_at(path: str) -> list[KeyGroup]:
    """Return the groups of a section (`sync`) or of a mapping (`sync.period`), or a group with a single key (`optim.lr`).

    Raises RecipeError, which suggests a similar key, if there is no such section or key.
    """
    groups = [group for section in sections() for group in key_groups(section)]
    found = [group for group in groups if group.path == path or group.path.startswith(f"{path}.")]
    if found:
        return found
    parent, _, name = path.rpartition(".")
    for group in groups:
        keys = tuple(key for key in group.keys if key.name == name)
        if group.path == parent and keys:
            found.append(KeyGroup(group.path, group.kind, group.description, keys))
    if not found:
        known = [f"{group.path}.{key.name}" for group in groups for key in group.keys]
        same_name = [key for key in known if key.endswith(f".{path}")]
        near = next(iter(same_name), None) or closest(path, [*sections(), *known])
        hint = f"did you mean {near}?" if near else f"sections are {', '.join(sections())}"
        raise RecipeError(f"{path} is neither a section nor a key of a recipe; {hint}")
    return found


def show_keys(groups: Sequence[KeyGroup]) -> None:
    """Print one table per group. It has the first sentence of each key's meaning, or the complete meaning of a single key."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    is_single = len(groups) == 1 and len(groups[0].keys) == 1
    for group in groups:
        console.print(Text(group.title, style="bold"))
        console.print(Text(_without_marks(group.description.partition("\n\n")[0])))
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for head in ("key", "value", "default"):
            table.add_column(head, overflow="fold", no_wrap=head == "key")
        table.add_column("meaning", overflow="fold", ratio=1)
        for key in group.keys:
            meaning = key.meaning if is_single else key.first_sentence
            table.add_row(*(Text(_without_marks(cell)) for cell in (key.name, key.values, key.default, meaning)))
        console.print(table)


def _without_marks(markdown: str) -> str:
    """Return a text in one line, without Markdown's backticks."""
    return " ".join(markdown.replace("`", "").split())


def _groups(path: str, value: dict[str, Any], schema: dict[str, Any]) -> Iterator[KeyGroup]:
    inside = [option.get("items", option) for option in _options(value)]
    for mapping in (_resolve(option, schema) for option in inside if "$ref" in option):
        from_preset = PRESET_KEYS if path == "sync" else ()
        kind = mapping["properties"].get("kind", {}).get("const")
        yield KeyGroup(path, kind, _docstring(mapping, mapping["title"]), tuple(_keys(mapping, schema, from_preset)))
        for key, inner in mapping["properties"].items():
            yield from _groups(f"{path}.{key}", inner, schema)


def _keys(section: dict[str, Any], schema: dict[str, Any], from_preset: Sequence[str]) -> Iterator[KeyReference]:
    """Yield a section's keys. Keys in `from_preset` have "the method's" as their default."""
    for key, value in section["properties"].items():
        default = "the method's" if key in from_preset else _default(value)
        meaning = _docstring(value, f"{section['title']}.{key}")
        yield KeyReference(key, _allowed(value, schema), default, meaning)


def _docstring(described: dict[str, Any], name: str) -> str:
    """Return the docstring of a class or key in the schema. Raises RecipeError if there is none."""
    if "description" not in described:
        raise RecipeError(f"{name} of llmtrain/config has no docstring; write one, which recipe keys and the docs show")
    return described["description"]


def _allowed(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a short description of the values that a key allows."""
    return " or ".join(_one_allowed(option, schema) for option in _options(value))


def _one_allowed(option: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in option:
        kind = _resolve(option, schema)["properties"].get("kind", {})
        return f"`{kind['const']}`" if "const" in kind else _one_allowed(kind, schema) if kind else "mapping"
    if "const" in option:
        return f"`{option['const']}`"
    if "enum" in option:
        return " or ".join(f"`{word}`" for word in option["enum"])
    if "prefixItems" in option:
        return "[" + ", ".join(_one_allowed(item, schema) for item in option["prefixItems"]) + "]"
    if "items" in option:
        return f"[{_one_allowed(option['items'], schema)}, ...]"
    word = WORDS.get(option["type"], option["type"])
    bounds = " and ".join(f"{sign} {option[bound]}" for bound, sign in SIGNS.items() if bound in option)
    pattern = f"matching `{option['pattern']}`" if "pattern" in option else ""
    return " ".join(part for part in (word, bounds, pattern) if part)


def _options(value: dict[str, Any]) -> list[dict[str, Any]]:
    return value.get("anyOf") or value.get("oneOf") or [value]


def _resolve(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][value["$ref"].rpartition("/")[2]]


def _default(value: dict[str, Any]) -> str:
    return in_code(value["default"]) if "default" in value else "`{}`" if value.get("type") == "object" else ""


def in_code(value: Any) -> str:
    """Return a value as written in a recipe, as Markdown code: flow YAML without quotes around words."""
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key}: {_plain(inner)}" for key, inner in value.items()) + "}`"
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
