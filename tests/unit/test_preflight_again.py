"""`recipe check` and a start agree: on a run's own recipe, on its mesh, and on texts of `eval.sets`, which must not be trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.errors import DataError
from llmtrain.launch.preflight import check_elsewhere, check_here
from llmtrain.plan.recipe_warnings import recipe_warnings
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
        return recipe_warnings(load_recipe(RECIPE, [*keys, *changed]))

    news, source = f"eval.sets={{news: {folder}/news.txt}}", f"data.source={folder}"
    (line,) = warnings_of(source, f"data.validation={folder}/held.txt", news)
    assert line.startswith(f"eval.sets.news: {folder}/news.txt is in data.source={folder}, so it is trained on")
    assert warnings_of(source, f"data.validation={folder}/news.txt", news) == []
    assert warnings_of(f"data.source={folder}/a.txt", news) == []
    entries = f"{{source: {folder}/a.txt, name: a, validation: {folder}/held.txt}}, {{source: {folder}, name: b}}"
    (line,) = warnings_of(f"data.sources=[{entries}]")
    assert line.startswith(f"data.sources[0].validation: {folder}/held.txt is in data.sources[1].source={folder}")


ONE_REPLICA, RANK_4 = (
    "there is one replica, so sync.method=edit averages with nobody",
    "log.profile.ranks has 4, but the ranks",
)
AUTO = ["parallel.replicas=auto", "parallel.shards=auto", "parallel.on_cpu=null"]


@pytest.mark.parametrize(
    ("changed", "processes", "lines"),
    [
        (AUTO, 1, [ONE_REPLICA]),
        ([*AUTO, "log.profile={ranks: [0, 4]}"], 1, [ONE_REPLICA, f"{RANK_4} are 0 to 0,"]),
        (["parallel.shards=2"], 2, [ONE_REPLICA]),
        (["parallel.shards=2", "log.profile={ranks: [0, 4]}"], 4, [f"{RANK_4} are 0 to 3,"]),
        (["parallel.shards=2", "log.profile={ranks: [0, 3]}"], 4, []),
        ([*AUTO, "parallel.replicas=1"], 1, []),
        ([*AUTO, "sync.method=gpa", "sync.period=1", "sync.outer.decay=0.5"], 1, []),
        ([*AUTO, "sync.method=synchronous", "sync.period=every_step", "sync.warmup_steps=0"], 1, []),
        ([*AUTO, "parallel.replicas=4", "parallel.in_process=true", "log.profile={ranks: [3]}"], 1, []),
    ],
    ids=str,
)
def test_recipe_check_warns_of_the_mesh_as_a_start_does(
    keys: list[str], changed: list[str], processes: int, lines: list[str]
) -> None:
    recipe = load_recipe(RECIPE, [*keys, *changed])
    here = check_here(recipe, per_node=processes)
    ranks, shards = here.replicas * here.shards, SimpleNamespace(size=here.shards)
    world = SimpleNamespace(size=ranks, local_size=ranks)
    mesh = SimpleNamespace(replicas=here.replicas, shard_comms=shards, world=world, unencrypted=None)
    start = list(_start_warnings(recipe, mesh, SimpleNamespace(all={})))
    assert start == here.warnings == check_elsewhere(recipe, processes)
    assert len(start) == len(lines) and all(map(str.startswith, start, lines))


def test_the_number_of_replicas_elsewhere_may_depend_on_nodes(keys: list[str]) -> None:
    (line,) = check_elsewhere(load_recipe(RECIPE, [*keys, *AUTO, "log.profile={ranks: [4]}"]), 2)
    assert line.startswith(f"{RANK_4} are 0 to 1,")
