"""Values of the published methods, written by hand from their docstrings and docs/methods.md.

All other tests read `PRESET`, so a changed value would pass them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.methods import METHODS

AVERAGE = {"outer.kind": "average", "reduction.kind": "mean", "schedule.kind": "blocking"}
"""Keys of local SGD: theta <- mean of all theta, while training waits."""
NESTEROV = {"outer.kind": "nesterov", "reduction.kind": "mean", "schedule.kind": "blocking"}
"""Keys of DiLoCo: Nesterov momentum on the mean pseudo-gradient, while training waits."""
EDIT = {
    "warmup_steps": 1000,
    "outer.kind": "nesterov",
    "outer.lr": 0.8,
    "outer.momentum": 0.85,
    "reduction.kind": "edit_penalty",
    "reduction.z": 3.0,
    "reduction.ema": 0.02,  # alpha
    "reduction.clip": 10.0,  # phi
    "reduction.temperature": 1.0,
    "reduction.min_rounds": 10,  # our choice, as are the next two
    "reduction.statistics": "adaptive",
    "reduction.max_exclusions": 20,
    "schedule.kind": "layerwise",
}


def steps(every: int, warmup: int = 0) -> dict[str, Any]:
    """Return the keys of rounds of `every` steps after `warmup` synchronous steps."""
    return {"warmup_steps": warmup, "period.kind": "steps", "period.every": every}


VALUES: dict[str, dict[str, Any]] = {
    "synchronous": {**AVERAGE, "period.kind": "every_step"},
    "local_sgd": {**AVERAGE, **steps(32)},
    "post_local_sgd": {**AVERAGE, **steps(16), "warmup_until_lr": 0.5},
    "qsr": {**AVERAGE, "warmup_steps": 0, "period.kind": "qsr", "period.base": 4, "period.power": 2.0},
    "des_loc": {**AVERAGE, **steps(32), "moments.first": 3, "moments.second": 6},
    "slowmo": {
        **steps(48),
        "outer.kind": "momentum",
        "outer.lr": 1.0,  # alpha
        "outer.momentum": 0.5,  # beta
        "outer.normalize": "lr",  # the learning rate of the round's last step
        "outer.clip": None,
        "reduction.kind": "mean",
        "schedule.kind": "blocking",
    },
    "diloco": {**NESTEROV, **steps(500), "outer.lr": 0.7, "outer.momentum": 0.9},
    "muloco": {**NESTEROV, **steps(30), "outer.lr": 0.8, "outer.momentum": 0.8},
    "sparseloco": {
        **steps(15),
        "outer.kind": "sgd",  # no outer momentum
        "outer.lr": 1.0,
        "reduction.kind": "mean",
        "schedule.kind": "blocking",
        "wire.kind": "topk",
        "wire.keep": 64,  # of 4096
        "wire.values": "2bit",
        "wire.error_feedback": True,
        "wire.feedback_decay": 0.95,
    },
    "streaming_diloco": {
        **NESTEROV,
        **steps(100),
        "outer.lr": 0.4,
        "outer.momentum": 0.9,
        "schedule.kind": "overlapped",
        "schedule.steps": 5,
        "schedule.fragments": 4,
        "schedule.fragment_layout": "strided",
        "schedule.alpha": 0.5,
        "wire.kind": "int4",
    },
    "co2": {
        **steps(48),
        "outer.kind": "momentum",
        "outer.lr": 1.0,
        "outer.momentum": 0.2,  # beta
        "outer.clip": 1.0,  # phi
        "outer.normalize": "none",
        "reduction.kind": "mean",
        "schedule.kind": "delayed",
        "schedule.gap_penalty": True,  # L
        "schedule.fragments": 1,
    },
    "palsgd": {
        **NESTEROV,
        **steps(32, warmup=32),
        "outer.lr": 0.7,
        "outer.momentum": 0.9,
        "pull.probability": 0.2,
        "pull.strength": 1.0,  # eta
        "pull.batch": "keep",
    },
    "wagma": {**AVERAGE, **steps(10), "schedule.kind": "wait_avoiding", "schedule.group_size": "auto"},
    "edit": {**EDIT, **steps(128, warmup=1000), "reduction.step_weight": 0.0},
    "a_edit": {
        **EDIT,
        "period.kind": "seconds",
        "period.every": 600.0,
        "period.min_steps": 100,
        "reduction.step_weight": 0.0,
    },
    "snoo": {**NESTEROV, **steps(30), "outer.lr": 0.7, "outer.momentum": 0.8},
    "gpa": {
        **steps(1),
        "outer.kind": "gpa",
        "outer.decay": 0.9967,
        "outer.share": 0.7,
        "reduction.kind": "mean",
        "schedule.kind": "blocking",
    },
}


def leaves(keys: dict[str, Any], of: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested keys as dotted keys, with their values."""
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{of}{key}.")
        else:
            yield of + key, value


@pytest.mark.parametrize("method", METHODS)
def test_a_recipe_that_names_a_method_has_its_published_values(method: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"train: {{steps: 2000}}\nsync: {{method: {method}}}")
    loaded = load_recipe(recipe, ["sync.period.alpha=0.02"] if method == "qsr" else [])
    found = dict(leaves(loaded.sync.model_dump()))
    assert {key: found.get(key, "missing") for key in VALUES[method]} == VALUES[method]
    if method == "muloco":
        assert (loaded.optim.kind, loaded.optim.muon.momentum) == ("muon", 0.9)


def test_every_value_of_a_preset_is_written_here() -> None:
    for method, module in METHODS.items():
        named = {key for key, _ in leaves(module.PRESET)}
        missing = {key for key in named if not {key, f"{key}.kind"} & VALUES[method].keys()}
        assert not missing, f"{method}: {sorted(missing)}"
