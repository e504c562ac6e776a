"""Output of `recipe show --methods`: the times for which a recipe with each method would wait for the network. And the time that
one replica alone would take, which is what several replicas compete with."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from llmtrain.errors import UserError
from llmtrain.plan.hardware import Hardware
from llmtrain.plan.method_table import MethodTimes, method_times, show_methods
from llmtrain.plan.model_size import size_of
from llmtrain.plan.show import show_plan
from llmtrain.plan.time_estimate import HardwareRates, estimate_time
from llmtrain.quantities import format_duration
from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.methods import METHODS

STDLIB = Path(__file__).parents[2] / "recipes/edit_llama_stdlib.yaml"
RATES = HardwareRates(flops=1e10, mbit=10.0, latency_ms=20.0)
HARDWARE = Hardware(RATES, "each rank on this CPU", "measured here", on_gpu=False)
FAST = HardwareRates(flops=1e10, mbit=200.0)
MESH = ("parallel.replicas=4", "parallel.shards=1")


def found(*overrides: str) -> MethodTimes:
    keys = [*MESH, *overrides]
    return method_times(load_recipe(STDLIB, keys), partial(load_recipe, STDLIB, keys), HARDWARE)


def test_every_method_has_a_row_or_the_reason_why_not() -> None:
    times = found()
    assert times.mesh == (4, 1)
    assert set(times.estimates) | set(times.refused) == set(METHODS) and not set(times.estimates) & set(times.refused)
    assert set(times.refused) == {"qsr"} and "sync.period.alpha" in times.refused["qsr"]


def test_a_row_is_what_the_recipe_with_this_method_would_take() -> None:
    """Rounds keep their length, and the wire stays unless the method has its own. The rest is the preset's."""
    times = found(
        "sync.method=diloco",
        "sync.schedule=layerwise",
        "sync.period.every=12",
        "sync.wire={kind: int8, gradients: true}",
    )
    assert times.estimates["diloco"][0].schedule.kind == "layerwise"
    period, wire = "sync.period.every=12", "sync.wire={kind: int8, gradients: true}"
    for method, kept in (("co2", [period, wire]), ("streaming_diloco", [period]), ("synchronous", [wire])):
        recipe = load_recipe(STDLIB, [*MESH, f"sync.method={method}", *kept])
        sync, time = times.estimates[method]
        assert sync == recipe.sync
        assert time == estimate_time(recipe, size_of(recipe), 4, 1, RATES)


def test_a_table_fits_and_names_the_recipes_own_method_in_bold() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False, force_terminal=True, color_system="standard")
    keys = [*MESH, "sync.method=co2"]
    show_methods(load_recipe(STDLIB, keys), partial(load_recipe, STDLIB, keys), console, HARDWARE)
    text = console.file.getvalue()
    assert "…" not in text
    assert "One replica alone would train as fast as 4 replicas that compute for 25.0% of the time." in text
    bold = [line for line in text.splitlines() if "\x1b[1m" in line and "co2" in line]
    assert len(bold) == 1 and "delayed" in bold[0]
    assert "qsr: " in text and "every step" in text and "overlapped, 5 " in text


@pytest.mark.parametrize(
    ("override", "words"),
    [("parallel.replicas=1", "give parallel.replicas=4"), ("parallel.in_process=true", "none waits for a network")],
)
def test_replicas_that_send_nothing_are_no_comparison(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        found(override)


def test_an_open_mesh_is_a_typical_one() -> None:
    keys = ["parallel.on_cpu=null"]
    hardware = Hardware(RATES, "each rank", "--tflops", on_gpu=True)
    times = method_times(load_recipe(STDLIB, keys), partial(load_recipe, STDLIB, keys), hardware)
    assert times.mesh == (4, 1)


@pytest.mark.parametrize("method", ["synchronous", "edit"])
def test_only_one_micro_batch_of_a_step_hides_messages(method: str) -> None:
    """Gradients are sent in the last micro-batch's backward pass, blocks in the first micro-batch's forward pass."""
    recipe = load_recipe(STDLIB, [*MESH, f"sync.method={method}", "sync.warmup_steps=0"])
    micro_batch = recipe.train.global_batch // 4
    one, two, four = (
        estimate_time(
            recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": size})}),
            size_of(recipe),
            4,
            1,
            FAST,
        )
        for size in (micro_batch, micro_batch // 2, micro_batch // 4)
    )
    assert one.step == two.step == four.step
    hidden = one.message - one.waiting * (1 if method == "synchronous" else recipe.sync.period.every)
    assert hidden > 0 and one.waiting < two.waiting < four.waiting


def test_one_replica_alone_trains_on_all_tokens_without_a_network() -> None:
    keys, name = (*MESH, "train.steps=100"), "run, one replica alone"
    recipe = load_recipe(STDLIB, keys)

    def shown(*overrides: str, is_this_cpu: bool = False) -> str:
        hardware = Hardware(RATES, "each rank", "--tflops", on_gpu=True, is_this_cpu=is_this_cpu)
        console = Console(file=io.StringIO(), width=100)
        show_plan(load_recipe(STDLIB, [*keys, *overrides]), console, hardware)
        return console.file.getvalue()

    seconds = 4 * 100 * estimate_time(recipe, size_of(recipe), 4, 1, RATES).step
    assert re.search(rf"{name} +{format_duration(seconds)} *\n", shown())
    without = shown("parallel.replicas=1"), shown("parallel.in_process=true"), shown(is_this_cpu=True)
    assert not [text for text in without if name in text]
