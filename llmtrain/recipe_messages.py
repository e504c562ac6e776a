"""One-line messages for recipe errors: the file, the key, the given value, and the allowed values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from llmtrain.config import Recipe, Section

ELSEWHERE = {
    "optim.lr": ("learning_rate",),
    "optim.clip_norm": ("grad_clip", "max_grad_norm", "max_norm"),
    "train.global_batch": ("batch_size", "global_batch_size", "gradient_accumulation_steps"),
    "train.micro_batch": ("local_batch_size", "micro_batch_size", "per_device_train_batch_size"),
    "train.sequence_length": ("block_size", "max_seq_length", "seq_len", "sequence_len"),
    "train.steps": ("max_iters", "max_steps"),
    "sync.period": ("H", "local_steps", "sync_every"),
    "parallel.precision": ("dtype",),
}
"""Names that nanoGPT, torchtitan, axolotl, transformers and papers on DiLoCo use, by our key; for messages only."""


@dataclass(frozen=True)
class Overlay:
    """Recipe keys from one source, such as a file; `label` names the source in messages."""

    label: str
    data: dict[str, Any]


def closest(given: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name most similar to `given`, or None if no name has a difflib ratio of at least `cutoff`."""
    return next(iter(get_close_matches(given, list(names), n=1, cutoff=cutoff)), None)


def one_of(names: Iterable[str]) -> str:
    """Return the names as `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def explain(error: ValidationError, layers: Sequence[Overlay], data: dict[str, Any]) -> str:
    """Return a message for the first problem in a failed validation of `data`, into which `layers` were merged.

    An unknown key takes precedence over other problems.
    """
    problems = error.errors(include_url=False)
    # An unknown key explains more than the wrong value that it may have caused.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), _as_given(problems, data))
    path = _key_path(first["loc"], data)
    key = ".".join(path)
    label = next((layer.label for layer in reversed(layers) if _contains(layer.data, path)), layers[-1].label)
    if first["type"] == "extra_forbidden":
        return f"{label}: {_unknown_key(path, data)}"
    if first["type"].startswith("union_tag"):
        return f"{label}: {key}.kind is {format_value(first['input'].get('kind'))}, expected {one_of(_variants(path, data))}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        name = first["loc"][-1]
        meaning = " ".join(_section(path, data).model_fields[name].description.split())
        return f"{label}: {key}.{name} is not given and has no default; {meaning[0].lower()}{meaning[1:]}"
    alternatives = [_expected(p) for p in problems if _key_path(p["loc"], data) == path]
    if "a mapping of keys" in alternatives:
        alternatives = [
            *(["a number of steps"] if path == ["sync", "period"] else []),
            *_variants(path, data),
            *alternatives,
        ]
    if _takes_null(path, data):
        alternatives.append("null")
    return f"{label}: {key} is {format_value(first['input'])}, expected {one_of(dict.fromkeys(alternatives))}"


def explain_in(root: type[Section], error: ValidationError) -> str:
    """Return a message for the first problem in a file other than a recipe, whose keys are the fields of `root`.

    An unknown key takes precedence over other problems.
    """
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{path} is not given and has no default"
    if first["type"] != "extra_forbidden":
        return f"{path} is {format_value(first['input'])}; {first['msg'][0].lower()}{first['msg'][1:]}"
    section, parents = root, iter(first["loc"][:-1])
    for name in parents:
        annotation = section.model_fields[name].annotation
        section = next(_sections_in(annotation))
        if get_origin(annotation) in (dict, list, tuple):
            next(parents)  # a name or an index
    near = closest(str(first["loc"][-1]), section.model_fields)
    return f"{path} is not a key; " + (
        f"did you mean {near}?" if near else f"keys are {', '.join(section.model_fields)}"
    )


def _as_given(problems: list[dict[str, Any]], data: dict[str, Any]) -> dict[str, Any]:
    """Return the first problem. If entries of a list have inherited the wrong value from a key above them, return the problem of
    that key instead."""
    first = problems[0]
    alike = [problem for problem in problems if (problem["type"], problem["input"]) == (first["type"], first["input"])]
    return next((problem for problem in alike if _key_path(problem["loc"], data)[-1:] == [*problem["loc"]][-1:]), first)


def _key_path(loc: Sequence[str | int], data: Any) -> list[str]:
    """Return pydantic's location without the tags of unions, which are not recipe keys."""
    path = []
    for part in loc:
        if isinstance(data, dict) and part in data:
            data = data[part]
            path.append(str(part))
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
            path[-1] += f"[{part}]"
    return path


def _inside(data: Any, part: str) -> Any:
    """Return the value in `data` of one part of a key path: `key`, or `key[0]` for an entry of a list. A key that the user wrote as
    `key[0]` takes precedence."""
    if part in data:
        return data[part]
    name, _, index = part.partition("[")
    value = data[name]
    return value[int(index.removesuffix("]"))] if index else value


def _contains(data: Any, path: Sequence[str]) -> bool:
    for part in path:
        try:
            data = _inside(data, part)
        except (KeyError, IndexError, TypeError, ValueError):
            return False  # no such key or entry, nothing to look into, or no number
    return True


def _unknown_key(path: list[str], data: dict[str, Any]) -> str:
    *parents, name = path
    section = _section(parents, data)
    known = [".".join([*parents, key]) for key in section.model_fields]
    key = ".".join(path)
    if ":" in name:
        return f"{key} is not a key; YAML needs a space after the colon in `key: value`"
    if (ours := next((ours for ours, theirs in ELSEWHERE.items() if name in theirs), None)) is not None:
        return f"{key} is not a {'key' if parents else 'section'}; did you mean {ours}?"
    if not parents:
        elsewhere = [k for k in _all_keys(Recipe) if k.rpartition(".")[2] == name]
        near = closest(name, known) or next(iter(elsewhere), None)
        return f"{key} is not a section; " + (f"did you mean {near}?" if near else f"sections are {', '.join(known)}")
    for kind, other in _variants(parents, data).items():
        if name in other.model_fields and other is not section:
            chosen = section.model_fields["kind"].default
            return f"{key} belongs to kind {kind}, and {'.'.join(parents)}.kind is {chosen}; change the kind or leave {name} out"
    near = closest(name, section.model_fields)
    if near:
        return f"{key} is not a key; did you mean {'.'.join([*parents, near])}?"
    elsewhere = [k for k in _all_keys(Recipe) if k.rpartition(".")[2] == name]
    if elsewhere:
        return f"{key} is not a key; did you mean {elsewhere[0]}?"
    return f"{key} is not a key; keys of {'.'.join(parents)} are {', '.join(section.model_fields)}"


def _takes_null(path: Sequence[str], data: dict[str, Any]) -> bool:
    *parents, name = path
    field = _section(parents, data).model_fields.get(name)
    return field is not None and NoneType in get_args(field.annotation)


def _section(path: Sequence[str], data: dict[str, Any]) -> type[Section]:
    """Return the section class of the mapping at `path`. If there are several kinds, return the class of the kind in `data`."""
    section: type[Section] = Recipe
    for part in path:
        data = _inside(data, part)
        candidates = list(_sections_in(section.model_fields[part.partition("[")[0]].annotation))
        if not candidates:
            return Section  # a mapping with keys of the user's choice
        by_kind = {c.model_fields["kind"].default: c for c in candidates if "kind" in c.model_fields}
        section = by_kind.get(str(data.get("kind")), candidates[0])
    return section


def _variants(path: Sequence[str], data: dict[str, Any]) -> dict[str, type[Section]]:
    """Return {kind: class} for a tagged value, or {} for a plain section."""
    *parents, name = path
    candidates = list(_sections_in(_section(parents, data).model_fields[name.partition("[")[0]].annotation))
    return {c.model_fields["kind"].default: c for c in candidates} if len(candidates) > 1 else {}


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


def _all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = list(_sections_in(field.annotation))
        yield prefix + name
        for other in inner:
            yield from _all_keys(other, f"{prefix}{name}.")


def _expected(problem: dict[str, Any]) -> str:
    by_type = {
        "missing": "one more value",
        "too_long": f"at most {problem.get('ctx', {}).get('max_length')} values",
        "string_too_long": f"at most {problem.get('ctx', {}).get('max_length')} characters",
        "tuple_type": "a list",
        "string_pattern_mismatch": "letters, digits, '.', '_' and '-', the first a letter or digit",
        "model_type": "a mapping of keys",
        "model_attributes_type": "a mapping of keys",
        "dict_type": "a mapping of keys",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
    }
    text = by_type.get(problem["type"], problem["msg"].removeprefix("Input should be "))
    return f"a number {text}" if text.startswith(("greater", "less")) else text


def format_value(value: Any) -> str:
    """Return a value as written in a recipe, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
