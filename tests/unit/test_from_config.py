"""Tests of `model.from_config`: a run keeps the values of the config that it names, whatever happens to the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PretrainedConfig, Qwen3Config

from llmtrain.errors import UserError
from llmtrain.model import build, model_config
from llmtrain.pretrained import architecture_keys
from llmtrain.recipe_check import check
from llmtrain.recipe_diff import differences
from llmtrain.recipe_loader import load_recipe
from tests.unit.test_pretrained import GPT_NEO, LLAMA, SIZES, change_config

QWEN3 = Qwen3Config(vocab_size=257, num_key_value_heads=2, head_dim=4, **{**SIZES, "num_hidden_layers": 4})


def test_a_run_keeps_the_values_of_the_config_that_it_names(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path / "config")
    change_config(tmp_path / "config", made_by="another tool")
    (tmp_path / "mine.yaml").write_text(
        f"model: {{from_config: {tmp_path}/config, config: {{num_hidden_layers: 3}}}}\n"
        "train: {steps: 10, sequence_length: 32}\nsync: {method: synchronous}\n"
    )
    recipe = load_recipe(tmp_path / "mine.yaml")
    check(recipe, None)
    expected = {**LLAMA.to_dict(), "num_hidden_layers": 3}
    assert recipe.model.config == {key: expected[key] for key in architecture_keys(LLAMA)}
    assert (recipe.model.type, recipe.model.from_config) == ("llama", None)
    change_config(tmp_path / "config", rms_norm_eps=1e-3)
    assert differences(recipe, load_recipe(tmp_path / "mine.yaml")) == [
        "model.config.rms_norm_eps: 1e-05 there, 0.001 here"
    ]
    with pytest.raises(
        UserError, match=r"model\.config\.hiden_size is not a key of llama's config; did you mean model\.config\.hidden"
    ):
        check(load_recipe(tmp_path / "mine.yaml", ["model.config.hiden_size=5"]), None)


@pytest.mark.parametrize(
    ("config", "layers", "kinds"),
    [
        (QWEN3, {"num_hidden_layers": 3}, (3, ["full_attention"] * 3)),
        (GPT_NEO, {"num_layers": 1}, (1, ["global"])),
        (GPT_NEO, {"attention_types": [[["local"], 2]]}, (2, ["local"] * 2)),
    ],
    ids=["qwen3", "gpt_neo", "gpt_neo, attention"],
)
def test_a_config_may_be_given_other_layers(
    tmp_path: Path, config: PretrainedConfig, layers: dict[str, object], kinds: tuple[int, list[str]]
) -> None:
    config.save_pretrained(tmp_path / "config")
    (tmp_path / "mine.yaml").write_text(
        f"model: {{from_config: {tmp_path}/config, config: {json.dumps(layers)}}}\n"
        "train: {steps: 10, sequence_length: 32}\nsync: {method: synchronous}\n"
    )
    recipe = load_recipe(tmp_path / "mine.yaml")
    check(recipe, None)
    ours = model_config(recipe.model)
    assert build(ours, 64).causal_lm.config.num_hidden_layers == ours.num_hidden_layers == kinds[0]
    assert (getattr(ours, "attention_layers", None) or ours.layer_types) == kinds[1]
