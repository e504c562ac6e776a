"""`recipe check` and a start agree: on a run's own recipe, and on texts of `eval.sets`, which must not be trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.errors import DataError
from llmtrain.launch.preflight import check_here
from llmtrain.plan.ineffective_keys import ineffective_keys
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.train.build_trainer import _start_warnings
from llmtrain.train.prepare_data import prepare_for
from tests.unit.test_preflight import RECIPE, keys

__all__ = ["keys"]  # the fixture


def test_the_recipe_that_a_run_writes_gives_no_more_warnings_than_its_own(tmp_path: Path, keys: list[str]) -> None:
    """Check the recipe that gives every key, also those that the run's recipe leaves to their defaults."""
    for changed in ([], ["sync.wire={kind: int4, keep: 3}"]):
        recipe = load_recipe(RECIPE, [*keys, *changed])
        (tmp_path / "recipe.yaml").write_text(resolved_yaml(recipe))
        assert check_here(load_recipe(tmp_path / "recipe.yaml")).warnings == check_here(recipe).warnings


def test_token_files_of_eval_sets_may_be_of_the_tokenizer_that_is_trained(tmp_path: Path, keys: list[str]) -> None:
    np.save(tmp_path / "held.npy", np.arange(640, dtype="<u2") % 300)
    recipe = load_recipe(RECIPE, [*keys, f"eval.sets={{held: {tmp_path}/held.npy}}"])
    assert check_here(recipe).prepared is None
    prepare_for(recipe, show_progress=False)
    assert check_here(recipe).prepared is not None
    with pytest.raises(
        DataError, match=r"eval\.sets\.held: .*none\.npy: no file|eval\.sets\.held: .*none\.npy: no such file"
    ):
        check_here(load_recipe(RECIPE, [*keys, f"eval.sets={{held: {tmp_path}/none.npy}}"]))


def test_a_validation_text_that_is_trained_on_is_a_warning(tmp_path: Path, keys: list[str]) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "news", "held"):
        (tmp_path / f"texts/{name}.txt").write_text("text")
    folder = tmp_path / "texts"

    def warnings_of(*changed: str) -> list[str]:
        return ineffective_keys(load_recipe(RECIPE, [*keys, *changed]), {}, None)

    news, source = f"eval.sets={{news: {folder}/news.txt}}", f"data.source={folder}"
    (line,) = warnings_of(source, f"data.validation={folder}/held.txt", news)
    assert line.startswith(f"eval.sets.news: {folder}/news.txt is in data.source={folder}, so it is trained on")
    assert warnings_of(source, f"data.validation={folder}/news.txt", news) == []
    assert warnings_of(f"data.source={folder}/a.txt", news) == []
    entries = f"{{source: {folder}/a.txt, name: a, validation: {folder}/held.txt}}, {{source: {folder}, name: b}}"
    (line,) = warnings_of(f"data.sources=[{entries}]")
    assert line.startswith(f"data.sources[0].validation: {folder}/held.txt is in data.sources[1].source={folder}")


def test_a_rank_to_profile_that_does_not_exist_is_a_warning() -> None:
    world = SimpleNamespace(size=4, local_size=4)
    mesh = SimpleNamespace(replicas=2, shard_comms=SimpleNamespace(size=2), world=world, unencrypted=None)
    for ranks, lines in (("[0, 3]", []), ("[0, 4]", ["log.profile.ranks has 4, but the ranks are 0 to 3"])):
        recipe = load_recipe(RECIPE, [f"log.profile={{ranks: {ranks}}}"])
        found = _start_warnings(recipe, mesh, SimpleNamespace(vocab_size=2048), SimpleNamespace(all={}))
        assert [line.partition(", so")[0] for line in found] == lines
