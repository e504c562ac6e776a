"""What every section of a recipe is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


def _count(value: Any) -> Any:
    """`100e9` is a float to YAML and a count to everybody else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[PositiveInt, BeforeValidator(_count)]


def kind(value: Any) -> Any:
    """`layerwise` is short for `{kind: layerwise}`."""
    return {"kind": value} if isinstance(value, str) else value


class Section(BaseModel):
    """Unknown keys are refused; values don't change once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
