"""Base class and value types of recipe sections."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt
from pydantic_core import PydanticCustomError

from llmtrain.files import LONGEST_NAME, LONGEST_PATH, is_too_long

Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
UNION_KEYS = ("period", "reduction", "outer", "schedule", "wire")
"""Keys of `sync` whose value has a `kind`."""


def _count(value: Any) -> Any:
    """Convert a whole float to an int, because YAML reads `100e9` as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[PositiveInt, BeforeValidator(_count)]
CountOrZero = Annotated[NonNegativeInt, BeforeValidator(_count)]


def _expanded(path: str) -> str:
    """Return a path with `~` expanded, and a URL as it is."""
    if not path.removeprefix("file:").strip("/") and not path.startswith("/"):
        raise PydanticCustomError("path_empty", "Input should be a path")
    path = os.path.expanduser(path)
    if is_too_long(path):
        rule = f"a path of at most {LONGEST_PATH} bytes, with names of at most {LONGEST_NAME}"
        raise PydanticCustomError("path_too_long", f"Input should be {rule}")
    return path


PathText = Annotated[str, AfterValidator(_expanded)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)]


def expand_kind(value: Any) -> Any:
    """Expand the short form `layerwise` to `{kind: layerwise}`."""
    return {"kind": value} if isinstance(value, str) else value


def expand_period(value: Any) -> Any:
    """Expand the short form 10 to `{kind: steps, every: 10}`, and the short form that `expand_kind` expands."""
    value = _count(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return {"kind": "steps", "every": value} if is_number else expand_kind(value)


def expand_name(value: Any) -> Any:
    """Expand the short form `small` to `{name: small}`."""
    return {"name": value} if isinstance(value, str) else value


SYNC_SHORT_FORMS: Mapping[str, Callable[[Any], Any]] = dict.fromkeys(UNION_KEYS, expand_kind) | {
    "period": expand_period
}
"""Functions that expand a short form, such as `layerwise`, by key of `sync`."""


def expand_sync(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return choices of `sync` with their short forms expanded."""
    return {key: SYNC_SHORT_FORMS[key](value) if key in SYNC_SHORT_FORMS else value for key, value in choices.items()}


class Section(BaseModel):
    """An immutable group of keys that refuses unknown ones."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as {dotted key: value}; lists are kept as values."""
    if not isinstance(data, dict) or (prefix and not data):
        return {prefix: data}
    dot = f"{prefix}." if prefix else ""
    return {key: leaf for name, value in data.items() for key, leaf in leaves(value, f"{dot}{name}").items()}


def merge(under: dict[str, Any], over: dict[str, Any], tagged: Sequence[str] = ()) -> dict[str, Any]:
    """Return `over` merged over `under`. Mappings merge key by key; other values are replaced. A mapping in one of the
    `tagged` keys is also replaced if its `kind` differs."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        other_kind = both and key in tagged and value.get("kind", below.get("kind")) != below.get("kind")
        merged[key] = merge(below, value, UNION_KEYS if key == "sync" else ()) if both and not other_kind else value
    return merged
