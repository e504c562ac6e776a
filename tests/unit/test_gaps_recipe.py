"""What mutants of reading and checking recipes showed to be untested."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.errors import RecipeError
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe

MODEL = "{hidden_size: 16, intermediate_size: 32, num_attention_heads: 2, num_key_value_heads: 2, num_hidden_layers: 2}"
RECIPE = f"""
model: {{config: {MODEL}}}
data: {{tokenizer: "train:400"}}
train: {{steps: 400, sequence_length: 32, global_batch: 8, micro_batch: 1}}
eval: {{tokens: 64}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_another_method_is_not_pulled_as_the_old_one_was(tmp_path: Path) -> None:
    path = written(tmp_path, "train: {steps: 9}\nsync: {method: palsgd, pull: {strength: 0.5}}")
    assert load_recipe(path).sync.pull is not None
    assert load_recipe(path, ["sync.method=diloco"]).sync.pull is None


@pytest.mark.parametrize(("is_tied", "blocks"), [("true", 3), ("false", 4)])
def test_a_model_has_as_many_fragments_as_blocks_at_most(tmp_path: Path, is_tied: str, blocks: int) -> None:
    path = written(tmp_path, RECIPE)
    choices = [f"model.config.tie_word_embeddings={is_tied}", "sync.method=streaming_diloco"]
    check(load_recipe(path, [*choices, f"sync.schedule.fragments={blocks}"]), None)
    with pytest.raises(RecipeError, match=f"the model has {blocks} blocks"):
        check(load_recipe(path, [*choices, f"sync.schedule.fragments={blocks + 1}"]), None)


def test_the_last_place_that_gave_a_wrong_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("optim: {lr: slow}")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: optim\.lr is \"fast\""):
        load_recipe(written(tmp_path, "base: below.yaml\noptim: {lr: fast}"))


@pytest.mark.parametrize(
    ("child", "message"),
    [
        ("data: {'sources[2]': {weight: 3}}", "data.sources[2] is not a key"),
        ("data: {'sources[x]': {weight: 3}}", "data.sources[x] is not a key"),
        ("train: {steps: 5, 'steps[0]': 6}", "train.steps[0] is not a key"),
    ],
)
def test_a_key_that_looks_like_an_entry_is_blamed_on_the_file_that_has_it(
    tmp_path: Path, child: str, message: str
) -> None:
    (tmp_path / "below.yaml").write_text("data: {sources: [{source: a}, {source: b}]}\ntrain: {steps: 5}")
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, f"base: below.yaml\n{child}"))
    assert message in str(caught.value) and "recipe.yaml: " in str(caught.value)


def test_deepspeeds_own_keys_are_passed_on_unless_one_of_ours_says_the_same(tmp_path: Path) -> None:
    path, zero = written(tmp_path, RECIPE), ["parallel.engine=zero", "sync.warmup_steps=0"]
    check(load_recipe(path, [*zero, "parallel.deepspeed={zero_optimization: {overlap_comm: true}}"]), None)
    with pytest.raises(RecipeError, match="round_robin_gradients is True, but the engine needs its own value"):
        check(load_recipe(path, [*zero, "parallel.deepspeed={zero_optimization: {round_robin_gradients: true}}"]), None)
    with pytest.raises(
        RecipeError, match=r"^parallel\.deepspeed\.gradient_clipping is 1\.0, but this is what optim\.clip"
    ):
        check(load_recipe(path, [*zero, "parallel.deepspeed={gradient_clipping: 1.0}"]), None)
