"""The doctor's prediction for a recipe on the measured network, and the changes that it advises."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.config import Recipe
from llmtrain.doctor.finding import Level
from llmtrain.doctor.network_use import changes, network_use
from llmtrain.plan.model_size import ModelSize, size_of
from llmtrain.plan.time_estimate import HardwareRates, estimate_time
from llmtrain.recipe_loader import load_recipe

STDLIB = Path(__file__).resolve().parents[2] / "recipes/edit_llama_stdlib.yaml"
MESH = (4, 1)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    folder = tmp_path_factory.mktemp("network_use")
    keys = [f"run.out_dir={folder}", "data.tokenizer=train:2048", "parallel.replicas=4", "parallel.shards=1"]
    return lambda *overrides: load_recipe(STDLIB, [*keys, "sync.period.every=10", *overrides])


@pytest.fixture(scope="module")
def size(recipe: Callable[..., Recipe]) -> ModelSize:
    return size_of(recipe())


def slow(recipe: Recipe, size: ModelSize, used: float) -> HardwareRates:
    """Return rates at which the recipe computes for a share `used` of its time. Bisection finds the bandwidth."""
    low, high = 1e-3, 1e6
    for _ in range(100):
        middle = (low * high) ** 0.5
        rates = HardwareRates(1e10, middle)
        low, high = (middle, high) if estimate_time(recipe, size, *MESH, rates).computing < used else (low, middle)
    return HardwareRates(1e10, low)


def test_a_network_that_is_fast_enough_needs_no_advice(recipe: Callable[..., Recipe], size: ModelSize) -> None:
    found = network_use(recipe(), size, *MESH, HardwareRates(1e10, 1e6))
    assert found.level == Level.OK and found.advice == ""
    assert found.what.endswith("so 100% of the time is spent computing")


def test_what_would_wait_less_is_named_with_what_a_run_of_it_is_predicted(
    recipe: Callable[..., Recipe], size: ModelSize
) -> None:
    given = recipe("sync.method=diloco", "sync.warmup_steps=1")
    rates = slow(given, size, 0.6)
    found = network_use(given, size, *MESH, rates)
    assert found.level == Level.WARNING and "so 60% of the time is spent computing" in found.what
    named = re.findall(r"(\d+)% with ([\w.]+=(?:'\{[^}]*\}'|\w+))[,;]", found.advice)
    assert {keys.partition("=")[0] for _, keys in named} == {"sync.wire", "sync.period.every", "sync.schedule"}
    assert [share for share, _ in named] == sorted((share for share, _ in named), key=float, reverse=True)
    for share, keys in named:
        said = recipe("sync.method=diloco", "sync.warmup_steps=1", keys.replace("'", ""))
        assert round(100 * estimate_time(said, size, *MESH, rates).computing) == int(share), keys


def test_the_delay_is_the_shortest_that_hides_messages(recipe: Callable[..., Recipe], size: ModelSize) -> None:
    given = recipe("sync.method=diloco", "sync.warmup_steps=1")
    rates = slow(given, size, 0.6)
    by_steps = {
        steps: estimate_time(
            recipe(
                "sync.method=diloco",
                "sync.warmup_steps=1",
                f"sync.schedule={{kind: overlapped, steps: {steps}}}",
            ),
            size,
            *MESH,
            rates,
        ).computing
        for steps in (1, 2, 3, 5)
    }
    least = min(steps for steps, share in by_steps.items() if share > max(by_steps.values()) - 0.01)
    offered = [keys for keys, _ in changes(given, size, *MESH, rates) if keys.startswith("sync.schedule")]
    assert least > 1 and offered == [f"sync.schedule='{{kind: overlapped, steps: {least}}}'"]


def test_what_the_recipe_does_not_allow_is_not_offered(recipe: Callable[..., Recipe], size: ModelSize) -> None:
    """The exchange of EDiT's norms takes one step of the delay. Timed rounds have no length in steps."""
    edit = recipe("sync.method=edit", "sync.warmup_steps=1")
    offered = [keys for keys, _ in changes(edit, size, *MESH, HardwareRates(1e10, 1e6))]
    assert "sync.schedule='{kind: overlapped, steps: 2}'" in offered
    timed = recipe("sync.method=a_edit", "sync.warmup_steps=1", "sync.period={kind: seconds, every: 5}")
    assert not any(keys.startswith("sync.period") for keys, _ in changes(timed, size, *MESH, HardwareRates(1e10, 1e6)))


def test_synchronous_training_is_advised_to_average_less_often(recipe: Callable[..., Recipe], size: ModelSize) -> None:
    given = recipe("sync.method=synchronous", "sync.period=every_step")
    found = network_use(given, size, *MESH, slow(given, size, 0.5))
    assert found.level == Level.WARNING and "sync.method=edit" in found.advice


def test_a_recipe_that_no_choice_helps_is_not_told_to_use_what_it_has(
    recipe: Callable[..., Recipe], size: ModelSize
) -> None:
    given = recipe("sync.method=edit", "sync.warmup_steps=1", "sync.period.every=20")
    found = network_use(given, size, *MESH, HardwareRates(1e10, 1e-3))
    assert found.level == Level.WARNING and found.advice.startswith("use longer rounds")


def test_a_quick_start_after_pauses_shortens_the_wait(recipe: Callable[..., Recipe], size: ModelSize) -> None:
    far = HardwareRates(1e10, 100.0, latency_ms=100.0)
    given = recipe("sync.method=diloco", "sync.warmup_steps=0", "sync.period.every=20")
    slow, quick = (estimate_time(given, size, *MESH, rates).waiting for rates in (far, replace(far, slow_start=False)))
    assert 0 < quick < slow
