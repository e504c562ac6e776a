"""Tests of comparison files: which trials they plan, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llmtrain.compare.comparison import ConditionSection, load_comparison, trials
from llmtrain.errors import RecipeError
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes" / "compare").glob("*.yaml"))
SMALL = """
recipe: ../edit_llama_stdlib.yaml
overrides: [train.steps=20]
hosts: {count: 2}
runs:
  synchronous: {overrides: [sync.method=synchronous, sync.warmup_steps=0]}
  diloco:
conditions:
  thin: {bandwidth_mbit: 100, hosts: {1: {bandwidth_mbit: 10, cpus: 0.5}}}
  slow: {delays: {host: random, seconds: 0.3}, kills: [{host: 1, at: 5}]}
seeds: [1, 2]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "small.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_comparisons_plan_recipes_that_can_be_trained(file: Path) -> None:
    comparison = load_comparison(file)
    assert comparison.name == file.stem
    for planned in trials(comparison, file):
        recipe = load_recipe(planned.recipe, planned.overrides)
        check(recipe, planned.stages[0].replicas * comparison.hosts.processes)
        assert (recipe.parallel.replicas, recipe.run.seed) == (planned.stages[0].replicas, planned.seed)


def test_a_run_may_restart_on_more_and_fewer_hosts(tmp_path: Path) -> None:
    text = """
recipe: ../edit_llama_stdlib.yaml
hosts: {count: 4}
runs:
  elastic: {replicas: 2, restarts: [{after_step: 60, replicas: 4, global_batch: 64}, {after_step: 120, replicas: 1}]}
"""
    (planned,) = trials(load_comparison(written(tmp_path, text)), tmp_path / "small.yaml")
    assert [(stage.replicas, stage.until) for stage in planned.stages] == [(2, 60), (4, 120), (1, None)]
    assert "parallel.replicas=2" in planned.overrides
    more = (*planned.overrides, "parallel.replicas=4", "train.global_batch=64")
    assert planned.overrides_of(planned.stages[1]) == more
    assert planned.overrides_of(planned.stages[2])[-1] == "train.global_batch=64", "the batch is kept"
    assert planned.changes() == ["after step 60 with 4 hosts and 64 sequences per step", "after step 120 with 1 hosts"]


def test_runs_take_turns_under_a_condition_and_seeds_come_last(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL)
    planned = trials(load_comparison(file, ["optim.lr=1e-3"]), file)
    order = [(one.seed, one.condition, one.run) for one in planned]
    both = ("synchronous", "diloco")
    assert order == [(seed, condition, run) for seed in (1, 2) for condition in ("thin", "slow") for run in both]
    assert planned[1].directory == Path("runs/small/thin/diloco/seed-1")
    assert planned[1].recipe == tmp_path / "../edit_llama_stdlib.yaml"
    overrides = list(planned[0].overrides)
    assert overrides.index("train.steps=20") < overrides.index("sync.warmup_steps=0") < overrides.index("optim.lr=1e-3")
    assert {"run.seed=1", "run.name=seed-1", "parallel.replicas=2", "checkpoint.mirror=null"} <= set(overrides)


def test_the_settings_of_a_condition_are_those_of_its_file(tmp_path: Path) -> None:
    conditions = load_comparison(written(tmp_path, SMALL)).conditions
    for name, condition in yaml.safe_load(SMALL)["conditions"].items():
        assert yaml.safe_load(f"{{{conditions[name].settings()}}}") == condition
    assert conditions["thin"].settings() == "bandwidth_mbit: 100.0, hosts: {1: {bandwidth_mbit: 10.0, cpus: 0.5}}"
    assert ConditionSection().settings() == "no limits, no faults"
    unlimited = "on loopback, without limits"
    assert conditions["thin"].settings(shaping=False) == ConditionSection().settings(shaping=False) == unlimited
    assert conditions["slow"].settings(shaping=False) == f"{unlimited}, {conditions['slow'].settings()}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds:", "seed:"), "small.yaml: seed is not a key; did you mean seeds?"),
        (
            ("bandwidth_mbit: 100,", "bandwith_mbit: 100,"),
            "conditions.thin.bandwith_mbit .* did you mean bandwidth_mbit",
        ),
        (
            ("{bandwidth_mbit: 10,", "{bandwidth_mbit: -1,"),
            "conditions.thin.hosts.1.bandwidth_mbit is -1; input should be",
        ),
        (("hosts: {1:", "hosts: {2:"), "conditions.thin names host 2, but hosts.count is 2: they are 0 to 1"),
        (("delays: {host: random", "delays: {host: 7"), "conditions.slow names host 7"),
        (("seeds: [1, 2]", "seeds: []"), "seeds is "),
        (
            ("recipe: ../edit_llama_stdlib.yaml", ""),
            "runs.synchronous has no recipe; give runs.synchronous.recipe or recipe",
        ),
        (
            ("hosts: {count: 2}", "baseline: edit"),
            "baseline is 'edit', which is not one of the runs synchronous, diloco",
        ),
        (("runs:", "runs: 5\nrun:"), "run is not a key"),
        (("runs:", "runs: [\n"), r"small\.yaml:\d+: not YAML: "),
        (("runs:", "? \nruns:"), "a key is not a word or a number"),
        (("diloco:", "diloco: {replicas: 3}"), "runs.diloco has 3 replicas, one per host, but hosts.count is 2"),
        (
            ("diloco:", "diloco: {replicas: 1}"),
            "conditions.slow has a fault of host 1, which runs.diloco does not always use: it trains on 1 of 2; give",
        ),
        (
            ("diloco:", "diloco: {restarts: [{after_step: 5, replicas: 1}]}"),
            "runs.diloco has restarts, which conditions.slow with its pauses or kills excludes",
        ),
        (
            ("diloco:", "diloco: {restarts: [{after_step: 5, replicas: 1}, {after_step: 5, replicas: 2}]}"),
            "runs.diloco.restarts come after steps \\[5, 5\\]; give them in rising order",
        ),
        (("diloco:", "diloco: {restarts: [{after: 5, replicas: 1}]}"), "did you mean after_step"),
        (
            ("kills:", "garbage: {host: 1, first: 6, last: 5}, kills:"),
            "conditions.slow.garbage ends before it begins; give last >= first",
        ),
        (("host: random, ", ""), "conditions.slow.delays.host is not given and has no default"),
        (("seconds: 0.3", "second: 0.3"), "conditions.slow.delays.second is not a key; did you mean seconds?"),
        (("{host: 1, at: 5}", "{host: 1, after: 5}"), "conditions.slow.kills.0.after is not a key; keys are host, at"),
        (
            ("thin: {bandwidth_mbit: 100, hosts: {1: {bandwidth_mbit: 10,", "kills: {hosts: {1: {bandwith: 10,"),
            "conditions.kills.hosts.1.bandwith is not a key; did you mean bandwidth_mbit?",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    file = written(tmp_path, SMALL.replace(*change))
    with pytest.raises(RecipeError, match=message) as refused:
        load_comparison(file)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no such file; comparisons are YAML files"):
        load_comparison(tmp_path / "none.yaml")
