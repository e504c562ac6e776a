"""Base class and value types of recipe sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


def _count(value: Any) -> Any:
    """Convert a whole float to an int, because YAML reads `100e9` as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[PositiveInt, BeforeValidator(_count)]


def kind(value: Any) -> Any:
    """Expand the short form `layerwise` to `{kind: layerwise}`."""
    return {"kind": value} if isinstance(value, str) else value


def steps_or_kind(value: Any) -> Any:
    """Expand the short form 10 to `{kind: steps, every: 10}`, and that of `kind`."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return {"kind": "steps", "every": value} if is_number else kind(value)


def name(value: Any) -> Any:
    """Expand the short form `small` to `{name: small}`."""
    return {"name": value} if isinstance(value, str) else value


class Section(BaseModel):
    """An immutable group of keys that refuses unknown ones."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
