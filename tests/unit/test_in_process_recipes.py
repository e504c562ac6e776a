"""Tests of recipes that train all replicas in one process: which are refused, with what advice, and how they are planned."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from llmtrain.errors import RecipeError, UserError
from llmtrain.machine_check import check_machine
from llmtrain.plan.hardware import Hardware, hardware_of
from llmtrain.plan.memory import estimate
from llmtrain.plan.mesh_plan import plan_mesh, size_or_assumed
from llmtrain.plan.recipe_warnings import recipe_warnings, seconds_of_step
from llmtrain.plan.show import _memory
from llmtrain.plan.time_estimate import HardwareRates, estimate_time
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from tests.unit.test_recipe_wrong import RECIPE, assert_one_line_with


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """Write a valid recipe and return its path."""
    path = tmp_path / "right.yaml"
    path.write_text(RECIPE)
    return path


IN_PROCESS = [
    ([], 1, ["all replicas in one process, but not how many", "give parallel.replicas"]),
    (["parallel.replicas=4"], 4, ["in one process, but there are 4", "start one (llmtrain train)"]),
    (["parallel.replicas=4", "parallel.shards=2"], 1, ["without sharding, but parallel.shards is 2", "shards=1"]),
    (["parallel.replicas=2", "parallel.engine=zero"], 1, ["but parallel.engine is zero", "engine=fsdp2"]),
    (
        ["parallel.replicas=2", "sync.method=a_edit"],
        1,
        ["in lockstep", "sync.period is in seconds", "give their speeds in parallel.virtual_clock", "another method"],
    ),
    (
        ["parallel.replicas=2", "sync.method=a_edit", "parallel.virtual_clock.step_seconds=[1, 1, 2]"],
        1,
        ["parallel.virtual_clock.step_seconds has 3 numbers for 2 replicas", "one each"],
    ),
    (["parallel.replicas=2", "sync.method=wagma"], 1, ["in lockstep", "sync.schedule is wait_avoiding"]),
    (
        ["parallel.replicas=8", "sync.method=wagma", "sync.schedule.group_size=4"],
        1,
        ["in lockstep", "sync.schedule is wait_avoiding"],
    ),
    (["parallel.replicas=2", "log.trace={}"], 1, ["one timeline, but log.trace records one per rank"]),
    (["parallel.replicas=2", "log.profile={ranks: [0, 1]}"], 1, ["log.profile with 2 ranks"]),
    (["parallel.replicas=3"], 1, ["train.global_batch"]),
]


def test_processes_have_no_virtual_clock(right: Path) -> None:
    recipe = load_recipe(right, ["parallel.replicas=2", "parallel.virtual_clock.step_seconds=[1, 2]"])
    with pytest.raises(UserError) as caught:
        check(recipe, 2)
    assert_one_line_with(str(caught.value), ["processes have their own speed", "give in_process=true, or leave out"])


@pytest.mark.parametrize("method", ["a_edit", "wagma"])
def test_a_virtual_clock_stands_for_different_speeds(right: Path, method: str) -> None:
    keys = ["parallel.in_process=true", "parallel.replicas=2", f"sync.method={method}"]
    check(load_recipe(right, [*keys, "parallel.shards=1", "parallel.virtual_clock.step_seconds=[1, 2]"]), 1)


def test_pulls_take_no_time_so_nobody_knows_who_is_late(right: Path) -> None:
    keys = ["parallel.in_process=true", "parallel.shards=1", "parallel.replicas=2", "sync.method=wagma"]
    keys += ["parallel.virtual_clock.step_seconds=[1, 2]", "sync.pull.probability=0.1"]
    with pytest.raises(RecipeError, match=r"steps of sync\.pull take no time .* leave out one of the three"):
        check(load_recipe(right, keys), 1)


@pytest.mark.parametrize(("every", "lines"), [(4, 0), (60, 1)])
def test_rounds_of_seconds_are_compared_with_the_runs_virtual_time(right: Path, every: int, lines: int) -> None:
    """Twelve local steps take 4/3 s of virtual time each, however long they take on this machine."""
    keys = ["parallel.in_process=true", "parallel.replicas=2", "parallel.virtual_clock.step_seconds=[1, 2]"]
    keys += ["sync.method=a_edit", f"sync.period.every={every}", "train.steps=14", "sync.warmup_steps=2"]
    recipe = load_recipe(right, keys)
    assert seconds_of_step(recipe) == pytest.approx(4 / 3)
    found = [line for line in recipe_warnings(recipe) if line.startswith("sync.period.every")]
    assert len(found) == lines and all("12 local steps take about 16 s" in line for line in found)


@pytest.mark.parametrize(("overrides", "processes", "fragments"), IN_PROCESS)
def test_replicas_of_one_process_are_refused(
    right: Path, overrides: list[str], processes: int, fragments: list[str]
) -> None:
    recipe = load_recipe(
        right, ["parallel.in_process=true", "parallel.shards=auto", "parallel.replicas=auto", *overrides]
    )
    with pytest.raises(UserError) as caught:
        check(recipe, processes)
    assert_one_line_with(str(caught.value), fragments)


@pytest.mark.parametrize(
    "overrides", [[], ["parallel.shards=1"], ["log.profile={ranks: [3]}"], ["parallel.replica_backend=nccl"]]
)
def test_replicas_of_one_process_are_right(right: Path, overrides: list[str]) -> None:
    recipe = load_recipe(right, ["parallel.in_process=true", "parallel.replicas=4", "parallel.shards=auto", *overrides])
    check(recipe, 1)
    check_machine(recipe)


def test_what_is_planned_is_of_all_replicas(right: Path) -> None:
    """The plan has the memory and the time of the process, which never waits for a network."""
    mesh = ["parallel.shards=auto", "parallel.replicas=4", "checkpoint.background=false"]
    rates = HardwareRates(flops=1e12, mbit=10)
    apart, together = (load_recipe(right, [*mesh, f"parallel.in_process={given}"]) for given in ("false", "true"))
    size = size_or_assumed(apart)
    alone = estimate_time(apart, size, 4, 1, rates)
    of_all = estimate_time(together, size, 4, 1, rates)
    assert of_all.step == pytest.approx(4 * alone.step) and alone.waiting > 0
    assert (of_all.waiting, of_all.message, of_all.computing) == (0, 0, 1)
    assert of_all.run == pytest.approx(of_all.step * together.train.total_steps)
    shown = {}
    for name, recipe in (("apart", apart), ("together", together)):
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(_memory(recipe, size, [(4, 1)], Hardware(rates, "a CPU", "", on_gpu=False)))
        text = console.export_text()
        total = float(re.search(r"total\s+([\d,.]+)", text)[1])
        shown[name] = total * (1024 if "Estimated GiB" in text else 1)
    needed = estimate(together, size, 4, 1)
    assert shown["together"] == pytest.approx(needed.total(on_gpu=False) / 2**20, rel=0.01), "MiB"
    assert shown["apart"] < shown["together"] < 4 * shown["apart"]


@pytest.mark.parametrize(
    ("keys", "multiplied"),
    [
        (["sync.method=diloco"], set()),
        (["sync.method=streaming_diloco"], set()),
        (["sync.method=co2"], set()),
        (["sync.method=diloco", "sync.warmup_steps=5"], {"gradients"}),
        (["sync.method=diloco", "sync.warmup_until_lr=0.9"], {"gradients"}),
        (["sync.method=synchronous"], {"gradients"}),
        (["sync.method=edit"], {"activations"}),
        (["sync.method=edit", "sync.warmup_steps=5"], {"gradients", "activations"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_replica_holds_in_its_turn_only_counts_once(right: Path, keys: list[str], multiplied: set[str]) -> None:
    """Each replica keeps its weights, optimizer, anchors and messages, and what it holds while it waits for the others."""
    mesh = ["parallel.shards=auto", "parallel.replicas=4", "sync.warmup_steps=0", *keys]
    apart, together = (load_recipe(right, [*mesh, f"parallel.in_process={given}"]) for given in ("false", "true"))
    size = size_or_assumed(apart)
    one, all_of_them = (estimate(recipe, size, 4, 1) for recipe in (apart, together))
    for part in ("weights", "optimizer", "anchors", "messages", "host"):
        assert getattr(all_of_them, part) == 4 * getattr(one, part), part
    for part in ("gathered", "loss"):
        assert getattr(all_of_them, part) == getattr(one, part), part
    assert all_of_them.gradients == one.gradients * (4 if "gradients" in multiplied else 1)
    if "activations" in multiplied:
        assert 3 * one.activations < all_of_them.activations <= 4 * one.activations
    else:
        assert all_of_them.activations == one.activations
    stays = 4 * (one.weights + one.optimizer + one.anchors)
    assert stays < all_of_them.device_total <= (4 if "activations" in multiplied else 3.5) * one.device_total
    held = {"gradients": 3 * one.gradients, "activations": 3 * one.activations / 2}
    peak = one.device_total - one.weights - one.optimizer - one.anchors
    assert all_of_them.device_total - stays >= max((held[part] for part in multiplied), default=0) + peak / 2


def test_what_is_shown_is_of_the_process(right: Path) -> None:
    recipe = load_recipe(right, ["parallel.shards=auto", "parallel.replicas=4", "parallel.in_process=true"])
    assert hardware_of(recipe, None, tflops=1.0, mbit=10).device == "the process"


def test_replicas_share_the_memory_of_their_process(right: Path) -> None:
    keys = ["parallel.in_process=true", "parallel.shards=auto", "parallel.replicas=4"]
    recipe = load_recipe(right, keys)
    needed = estimate(recipe, size_or_assumed(recipe), 4, 1)
    state = needed.weights + needed.gradients + needed.optimizer + needed.anchors + needed.host
    assert plan_mesh(recipe, ["here"], [1.01 * state], on_gpu=False) == (4, 1, "in one process, in turns")
    with pytest.raises(RecipeError, match="for all replicas in one process, and the process has"):
        plan_mesh(recipe, ["here"], [0.99 * state], on_gpu=False)
