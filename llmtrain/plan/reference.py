"""Tables of recipe keys and methods for the documentation, generated from the code by `make docs`.

The output is all of docs/recipes.md, the table of methods in README.md, and the tables of conflicting choices in
docs/methods.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llmtrain.config import Recipe
from llmtrain.sync.compatibility import CHOICES, RULES, conflict_between
from llmtrain.sync.methods import METHODS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
README = ROOT / "README.md"
METHODS_PAGE = ROOT / "docs" / "methods.md"
METHODS_BEGIN, METHODS_END = "<!-- methods: written by `make docs` -->", "<!-- end of methods -->"
COMPOSITION_BEGIN, COMPOSITION_END = "<!-- composition: written by `make docs` -->", "<!-- end of composition -->"
INTRODUCTION = """\
# Recipes

<!-- Written by `make docs` from llmtrain/config; change it there. -->

A recipe is a YAML file that describes a complete run, in sections of keys. Each key has a default, and a recipe gives only the
keys that differ.

    python -m llmtrain recipe check RECIPE        # can it be trained? (--processes N: on N ranks?)
    python -m llmtrain recipe show RECIPE         # every key's value, the model's size, memory on each GPU, time
    python -m llmtrain recipe schema              # JSON schema, for editors

**Base files.** `base: FILE` or `base: [FILE, ...]` at the top names recipes, relative to this one, whose values this one
overrides. They may have base files themselves.

**Overrides.** Every command that takes a recipe takes keys after it, in three equivalent forms. Values are YAML:

    python -m llmtrain train recipes/quickstart.yaml optim.lr=1e-3 --run.name=mine --sync.period.every 32

**Precedence.** Later wins: the method's preset, base files in their order, the file itself, the command line. Mappings merge key
by key, but a `sync.period`, `reduction`, `outer`, `schedule` or `wire` of another kind replaces the old one completely. If a layer
names another method than the layers below it, their `reduction`, `outer`, `schedule` and `pull` no longer apply, because they were
chosen for the old method. Their period, warm-up and wire stay, so that methods are compared at the same round length. There are two
exceptions: a period of another kind than the new method's is dropped, and so is `warmup_steps` if the new method synchronizes every
step. There is no interpolation (`${...}`), and the environment is not read.

**What is refused.** An unknown key (the message names the nearest one), a value of another type, and combinations that can't run.
Each is refused with the reason, before anything starts.
"""
PRESETS = """\
What each method chooses. A recipe that gives part of a mapping keeps the preset's other values, unless it names another
kind; then, and where the preset has none, the defaults further down hold.

"""
WORDS = {"string": "text", "boolean": "`true` or `false`", "null": "`null`", "object": "mapping"}
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
PRESET_KEYS = tuple(dict.fromkeys(key for method in METHODS.values() for key in method.PRESET))


def recipe_reference() -> str:
    """Return the complete docs/recipes.md as Markdown."""
    schema = Recipe.model_json_schema()
    parts = [INTRODUCTION]
    for name, reference in schema["properties"].items():
        section = _resolve(reference, schema)
        parts.append(f"## `{name}`\n\n{section['description']}\n")
        parts.append(_keys(section, schema, from_preset=PRESET_KEYS if name == "sync" else ()))
        if name == "sync":
            parts.append(_presets())
        for key, value in section["properties"].items():
            parts.extend(_below(f"{name}.{key}", value, schema))
    return "\n".join(parts)


def _keys(section: dict[str, Any], schema: dict[str, Any], from_preset: Sequence[str] = ()) -> str:
    """Return a table of a section's keys. Keys in `from_preset` show "the method's" as their default."""
    rows = [
        (
            f"`{key}`",
            _allowed(value, schema),
            "the method's" if key in from_preset else _default(value),
            value["description"],
        )
        for key, value in section["properties"].items()
    ]
    return _table(("key", "value", "default", "meaning"), rows)


def _below(key: str, value: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Return a heading and a table for each mapping that a key allows: one per kind if it has kinds."""
    parts = []
    for mapping in (_resolve(option, schema) for option in _options(value) if "$ref" in option):
        kind = mapping["properties"].get("kind", {}).get("const")
        title = f"`{key}: {{kind: {kind}}}`" if kind else f"`{key}`"
        parts.append(f"### {title}\n\n{mapping['description']}\n")
        parts.append(_keys(mapping, schema))
    return parts


def methods_table() -> str:
    """Return README's table of the methods and their choices."""
    rows = []
    for name, method in METHODS.items():
        idea = method.__doc__.split("\n")[0].partition(": ")[2].rstrip(".")
        preset = method.PRESET
        outer = preset["outer"]["kind"]
        schedule = preset["schedule"]
        schedule = schedule if isinstance(schedule, str) else schedule["kind"]
        paper = method.PAPER.removeprefix("arXiv ")
        link = f"[{paper}](https://arxiv.org/abs/{paper})" if paper != method.PAPER else ""
        file = f"[`{name}`](llmtrain/sync/methods/{name}.py)"
        rows.append((file, link, idea, _when(preset), outer, schedule.replace("_", "-")))
    return _table(("`sync.method`", "paper", "idea", "synchronizes", "outer step", "schedule"), rows)


def _when(preset: dict[str, Any]) -> str:
    period = preset["period"]
    words = {"every_step": "every step", "qsr": "more rarely as the learning rate falls"}
    when = words.get(period["kind"]) or f"every {period['every']:g} {period['kind']}"
    return f"every step until the learning rate falls, then {when}" if "warmup_until_lr" in preset else when


def composition_table() -> str:
    """Return docs/methods.md's tables of which kinds of two choices cannot be combined, and why."""
    pairs = [(choice, kind) for choice, kinds in CHOICES.items() for kind in kinds]
    concerned = [pair for pair in pairs if any(conflict_between(*pair, *other) for other in pairs)]
    columns = [pair for pair in concerned if pair[0] in ("schedule", "period")]
    numbers = {id(rule): str(number) for number, rule in enumerate(RULES, start=1)}

    def cell(row: tuple[str, str], column: tuple[str, str]) -> str:
        if row[0] == column[0]:
            return ""
        rule = conflict_between(*row, *column)
        return "yes" if rule is None else f"no ({numbers[id(rule)]})"

    rows = [(f"{choice}: `{kind}`", *(cell((choice, kind), column) for column in columns)) for choice, kind in pairs]
    heads = ("", *(f"{choice}: `{kind}`" for choice, kind in columns))
    reasons = "".join(
        f"{numbers[id(rule)]}. {rule.choice} `{rule.kind}` and "
        f"{'; '.join(f'{other} {_kinds(kinds)}' for other, kinds in rule.excludes.items())}: {rule.why}.\n"
        for rule in RULES
    )
    return f"{_table(heads, rows)}\nEvery other pair goes together. Why not:\n\n{reasons}"


def _kinds(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def readme_with_methods(readme: str) -> str:
    """Return README's text with a new table between its two marks."""
    return _between(readme, METHODS_BEGIN, METHODS_END, methods_table())


def methods_page_with_composition(page: str) -> str:
    """Return docs/methods.md's text with new tables between its two marks."""
    return _between(page, COMPOSITION_BEGIN, COMPOSITION_END, composition_table())


def _between(text: str, begin: str, end: str, written: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{written}\n{end}{after}"


def _presets() -> str:
    rows = [
        (
            f"`{name}`",
            "<br>".join(f"`{key}:` {_code(value)}" for key, value in method.PRESET.items()),
            method.PAPER,
        )
        for name, method in METHODS.items()
    ]
    return PRESETS + _table(("method", "preset", "paper"), rows)


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
    return _code(value["default"]) if "default" in value else "`{}`" if value.get("type") == "object" else ""


def _code(value: Any) -> str:
    """Return a value as written in a recipe: flow YAML without quotes around words."""
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key}: {_plain(inner)}" for key, inner in value.items()) + "}`"
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |\n" for line in lines
    )


def main() -> None:
    """Write docs/recipes.md and the generated tables in README and docs/methods.md."""
    PAGE.write_text(recipe_reference(), encoding="utf-8")
    README.write_text(readme_with_methods(README.read_text(encoding="utf-8")), encoding="utf-8")
    METHODS_PAGE.write_text(methods_page_with_composition(METHODS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE} and the tables in {README} and {METHODS_PAGE}")
