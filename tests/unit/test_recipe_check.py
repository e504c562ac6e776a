"""Refusals of recipes before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.errors import ModelError, RecipeError
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


@pytest.mark.parametrize(("is_tied", "blocks"), [("true", 3), ("false", 4)])
def test_a_model_has_as_many_fragments_as_blocks_at_most(tmp_path: Path, is_tied: str, blocks: int) -> None:
    path = written(tmp_path, RECIPE)
    choices = [f"model.config.tie_word_embeddings={is_tied}", "sync.method=streaming_diloco"]
    check(load_recipe(path, [*choices, f"sync.schedule.fragments={blocks}"]), None)
    with pytest.raises(RecipeError, match=f"the model has {blocks} blocks"):
        check(load_recipe(path, [*choices, f"sync.schedule.fragments={blocks + 1}"]), None)


def test_heads_of_some_models_have_a_size_of_their_own(tmp_path: Path) -> None:
    heads = (
        "hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 6, num_key_value_heads: 6"
    )
    path = written(tmp_path, RECIPE)
    short = "sync.warmup_steps=0"
    check(load_recipe(path, [short, f"model={{type: qwen3, config: {{{heads}}}}}"]), None)
    with pytest.raises(ModelError, match="is not a multiple of the number of attention heads"):
        check(load_recipe(path, [short, f"model={{type: llama, config: {{{heads}}}}}"]), None)


def test_deepspeeds_own_keys_are_passed_on_unless_one_of_ours_says_the_same(tmp_path: Path) -> None:
    path, zero = written(tmp_path, RECIPE), ["parallel.engine=zero", "sync.warmup_steps=0"]
    check(load_recipe(path, [*zero, "parallel.deepspeed={zero_optimization: {overlap_comm: true}}"]), None)
    with pytest.raises(RecipeError, match="round_robin_gradients is True, but the engine needs its own value"):
        check(load_recipe(path, [*zero, "parallel.deepspeed={zero_optimization: {round_robin_gradients: true}}"]), None)
    with pytest.raises(
        RecipeError, match=r"^parallel\.deepspeed\.gradient_clipping is 1\.0, but a recipe sets it with optim\.clip"
    ):
        check(load_recipe(path, [*zero, "parallel.deepspeed={gradient_clipping: 1.0}"]), None)


def test_a_batch_that_ranks_cannot_share_is_told_those_beside_it_that_they_can(tmp_path: Path) -> None:
    path = written(tmp_path, RECIPE)
    keys = ["parallel.replicas=3", "parallel.shards=1", "sync.warmup_steps=0", f"run.out_dir={tmp_path}", "run.name=a"]
    with pytest.raises(RecipeError, match=r"x 3 = 3; use train\.global_batch=6 or 9$"):
        check(load_recipe(path, keys), None)
