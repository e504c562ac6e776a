"""The config that `model.from_config` names: its values are the run's, whatever becomes of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.pretrained import architecture_keys
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import differences, load_recipe, stored_recipe
from tests.unit.test_pretrained import LLAMA, change_config


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
    stored = recipe.model_dump(mode="json") | {"model": {"from_config": f"{tmp_path}/config"}}  # of an earlier version
    change_config(tmp_path / "config", rms_norm_eps=1e-3)
    assert stored_recipe(stored, "here").model.config["rms_norm_eps"] == 1e-3
    assert differences(recipe, load_recipe(tmp_path / "mine.yaml")) == [
        "model.config.rms_norm_eps: 1e-05 there, 0.001 here"
    ]
    with pytest.raises(
        UserError, match=r"model\.config\.hiden_size is not a key of llama's config; did you mean model\.config\.hidden"
    ):
        check(load_recipe(tmp_path / "mine.yaml", ["model.config.hiden_size=5"]), None)
