"""Recipes that train all replicas in one process: which are refused, and with what advice."""

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
from llmtrain.plan.show import _memory
from llmtrain.plan.time_estimate import HardwareRates, estimate_time
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from tests.unit.test_recipe_wrong import RECIPE, assert_one_line_with


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """A file with a recipe that is right."""
    path = tmp_path / "right.yaml"
    path.write_text(RECIPE)
    return path


IN_PROCESS = [
    ([], 1, ["all replicas in one process, but not how many", "give parallel.replicas"]),
    (["parallel.replicas=4"], 4, ["in one process, but there are 4", "start one (llmtrain train)"]),
    (["parallel.replicas=4", "parallel.shards=2"], 1, ["without sharding, but parallel.shards is 2", "shards=1"]),
    (["parallel.replicas=2", "parallel.engine=zero"], 1, ["but parallel.engine is zero", "engine=fsdp2"]),
    (["parallel.replicas=2", "sync.method=a_edit"], 1, ["in turns", "sync.period is in seconds", "another method"]),
    (["parallel.replicas=2", "sync.method=wagma"], 1, ["in turns", "sync.schedule is wait_avoiding"]),
    (
        ["parallel.replicas=8", "sync.method=wagma", "sync.schedule.group_size=4"],
        1,
        ["in turns", "sync.schedule is wait_avoiding"],
    ),
    (["parallel.replicas=2", "log.trace={}"], 1, ["one timeline, but log.trace records one per rank"]),
    (["parallel.replicas=2", "log.profile={ranks: [0, 1]}"], 1, ["log.profile with 2 ranks"]),
    (["parallel.replicas=3"], 1, ["train.global_batch"]),
]


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
    "overrides", [[], ["parallel.shards=1"], ["log.profile={}"], ["parallel.replica_backend=nccl"]]
)
def test_replicas_of_one_process_are_right(right: Path, overrides: list[str]) -> None:
    recipe = load_recipe(right, ["parallel.in_process=true", "parallel.replicas=4", "parallel.shards=auto", *overrides])
    check(recipe, 1)
    check_machine(recipe)


def test_what_is_planned_is_of_all_replicas(right: Path) -> None:
    """Memory and time of the process, which has to wait for no network."""
    mesh, rates = ["parallel.shards=auto", "parallel.replicas=4"], HardwareRates(flops=1e12, mbit=10)
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
    assert shown["together"] == pytest.approx(4 * shown["apart"], rel=0.01), "MiB"


def test_what_is_shown_is_of_the_process(right: Path) -> None:
    recipe = load_recipe(right, ["parallel.shards=auto", "parallel.replicas=4", "parallel.in_process=true"])
    assert hardware_of(recipe, None, tflops=1.0, mbit=10).device == "the process"


def test_replicas_share_the_memory_of_their_process(right: Path) -> None:
    keys = ["parallel.in_process=true", "parallel.shards=auto", "parallel.replicas=4"]
    recipe = load_recipe(right, keys)
    needed = estimate(recipe, size_or_assumed(recipe), 4, 1)
    state = needed.weights + needed.gradients + needed.optimizer + needed.anchors + needed.host
    assert plan_mesh(recipe, ["here"], [4.01 * state], on_gpu=False) == (4, 1, "in one process, in turns")
    with pytest.raises(RecipeError, match="for each replica, and for each of them there are"):
        plan_mesh(recipe, ["here"], [3.99 * state], on_gpu=False)
