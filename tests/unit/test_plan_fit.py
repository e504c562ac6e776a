"""Refusals, in one line and before anything is read, of runs that can not fit in memory, and of no others."""

from pathlib import Path

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.mesh_plan import plan_mesh
from llmtrain.recipe_loader import load_recipe

GIB = 2**30
EDIT_1B = Path("recipes/edit_1b.yaml")


@pytest.mark.parametrize(
    ("nodes", "per_node", "gib", "expected"),
    [(1, 1, 80, (1, 1)), (1, 8, 80, (8, 1)), (1, 8, 40, (4, 2)), (8, 8, 80, (8, 8)), (8, 8, 40, (8, 8))],
)
def test_edit_1b_nothing_edited(nodes, per_node, gib, expected):
    places = [f"node{node}" for node in range(nodes) for _ in range(per_node)]
    *mesh, reason = plan_mesh(load_recipe(EDIT_1B, []), places, [gib * GIB] * len(places), on_gpu=True)
    assert tuple(mesh) == expected and "\n" not in reason


def refusal(places: list[str], gib: float, *overrides: str, on_gpu: bool = True) -> str:
    memory = [80.0 * GIB] * (len(places) - 1) + [gib * GIB]
    with pytest.raises(RecipeError) as refused:
        plan_mesh(load_recipe(EDIT_1B, overrides), places, memory, on_gpu=on_gpu)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_too_little_memory_says_what_it_needs_and_what_is_there():
    message = refusal(["here"], 23.5, on_gpu=False)
    assert (
        "edit_1b has 1,028,196,352 parameters; as 1 replica x 1 shard it needs about 64.6 GiB for each process"
        in message
    )
    assert "(there is no GPU), and the machine has, for each, 23.5 GiB; give more devices" in message
    assert "checkpoint.background=false" in message and "background" not in refusal(["here"], 4)


@pytest.mark.parametrize(
    ("overrides", "offered"),
    [
        (("train.micro_batch=2", "train.global_batch=512"), {"train.micro_batch below 2", "activation_checkpointing"}),
        (("train.micro_batch=1",), {"activation_checkpointing"}),
        (("train.micro_batch=1", "parallel.activation_checkpointing=true"), set()),
    ],
)
def test_only_what_would_help_is_offered(overrides: tuple[str, ...], offered: set[str]):
    offers = refusal(["here"], 4, *overrides).rpartition("; give ")[2]
    assert {offer for offer in ("train.micro_batch below 2", "activation_checkpointing") if offer in offers} == offered


def test_the_smallest_device_decides_for_all():
    message = refusal(["a"] * 8 + ["b"] * 8, 16)
    assert "as 2 replicas x 8 shards" in message and "the smallest has 16.0 GiB" in message
    assert "parallel.shard_across_nodes=true" in message


def test_a_given_mesh_is_refused_only_for_what_is_certain():
    given = ("parallel.replicas=1", "parallel.shards=1")
    places, memory = ["here"], [24.0 * GIB]
    assert plan_mesh(load_recipe(EDIT_1B, given), places, memory, on_gpu=True)[:2] == (1, 1)
    assert "for weights, gradients, optimizer and anchors alone 17.2 GiB on each GPU" in refusal(places, 15, *given)


def test_a_tokenizer_that_is_not_here_yet_is_no_reason():
    recipe = load_recipe(EDIT_1B, ["data.tokenizer=some/tokenizer"])
    assert plan_mesh(recipe, ["here"], [80.0 * GIB], on_gpu=True)[:2] == (1, 1)
