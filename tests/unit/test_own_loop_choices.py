"""Choices given to `LocalUpdates`, which change a method's preset as a recipe's keys do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from llmtrain.config import (
    LayerwiseSection,
    NesterovSection,
    OuterRoundsSection,
    Section,
    StepsSection,
    WireSection,
)
from llmtrain.recipe_loader import load_recipe
from llmtrain.sync import LocalUpdates

FRAGMENTS = {"fragments": 2}
CHANGED = [
    ("edit", {"schedule": {"prefetch": 3}}, LayerwiseSection(prefetch=3)),
    ("edit", {"period": 20}, StepsSection(every=20)),
    ("diloco", {"outer": {"rounds": {"lr_warmup": 2}}}, NesterovSection(rounds=OuterRoundsSection(lr_warmup=2))),
    ("streaming_diloco", {"wire": {"keep": 32}, "schedule": FRAGMENTS}, WireSection(kind="int4", keep=32)),
    ("streaming_diloco", {"wire": {"kind": "fp4"}, "schedule": FRAGMENTS}, WireSection(kind="fp4")),
    ("sparseloco", {"wire": "topk"}, WireSection(kind="topk", error_feedback=True, feedback_decay=0.95)),
    ("sparseloco", {"wire": "bf16"}, WireSection(kind="bf16")),
]


@pytest.mark.parametrize(("method", "choices", "expected"), CHANGED)
def test_choices_change_a_preset_as_in_a_recipe(
    tmp_path: Path, method: str, choices: dict[str, Any], expected: Section
) -> None:
    """Presets and choices may both have short forms, such as `schedule: layerwise`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sync = LocalUpdates(model, torch.optim.SGD(model.parameters()), method, **choices).sync
    assert getattr(sync, next(iter(choices))) == expected
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"sync": {"method": method, **choices}}))
    assert load_recipe(recipe).sync == sync
