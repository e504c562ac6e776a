"""Comparison files: what is planned, in which order, and what is refused; the faults that ranks inject."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmtrain.compare.comparison import load_comparison, trials
from llmtrain.compare.faults import Faults, GarbageLoader
from llmtrain.errors import RecipeError
from llmtrain.recipe import load_recipe
from llmtrain.recipe_check import check

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes" / "compare").glob("*.yaml"))
SMALL = """
recipe: ../quickstart.yaml
overrides: [train.steps=20]
hosts: {count: 2}
runs:
  synchronous: {overrides: [sync.method=synchronous, sync.warmup_steps=0]}
  diloco:
conditions:
  thin: {bandwidth_mbit: 100, hosts: {1: {bandwidth_mbit: 10, cpus: 0.5}}}
  slow: {delays: {who: random, seconds: 0.3}, kills: [{host: 1, at: 5}]}
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
recipe: ../quickstart.yaml
hosts: {count: 4}
runs:
  elastic: {replicas: 2, restarts: [{after_step: 60, replicas: 4}, {after_step: 120, replicas: 1}]}
"""
    (planned,) = trials(load_comparison(written(tmp_path, text)), tmp_path / "small.yaml")
    assert [(stage.replicas, stage.until) for stage in planned.stages] == [(2, 60), (4, 120), (1, None)]
    assert "parallel.replicas=2" in planned.overrides
    assert planned.stages[1].overrides == ("parallel.replicas=4",)


def test_runs_take_turns_under_a_condition_and_seeds_come_last(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL)
    planned = trials(load_comparison(file, ["optim.lr=1e-3"]), file)
    order = [(one.seed, one.condition, one.run) for one in planned]
    both = ("synchronous", "diloco")
    assert order == [(seed, condition, run) for seed in (1, 2) for condition in ("thin", "slow") for run in both]
    assert planned[1].directory == Path("runs/small/thin/diloco/seed-1")
    assert planned[1].recipe == tmp_path / "../quickstart.yaml"
    overrides = list(planned[0].overrides)
    assert overrides.index("train.steps=20") < overrides.index("sync.warmup_steps=0") < overrides.index("optim.lr=1e-3")
    assert {"run.seed=1", "run.name=seed-1", "parallel.replicas=2"} <= set(overrides)


def test_conditions_in_words(tmp_path: Path) -> None:
    conditions = load_comparison(written(tmp_path, SMALL)).conditions
    assert conditions["thin"].words() == "100 Mbit/s, host 1: 10 Mbit/s, 0.5 CPUs"
    assert conditions["slow"].words() == (
        "no limit on bandwidth, another host sleeps 0.3 s in every step, host 1 dies after 5 s"
    )


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
            "conditions.thin.hosts.1.bandwidth_mbit is -1: input should be",
        ),
        (("hosts: {1:", "hosts: {2:"), "conditions.thin names host 2, but hosts.count is 2: they are 0 to 1"),
        (("who: random", "who: 7"), "conditions.slow names host 7"),
        (("seeds: [1, 2]", "seeds: []"), "seeds is "),
        (("recipe: ../quickstart.yaml", ""), "runs.synchronous has no recipe; give runs.synchronous.recipe or recipe"),
        (("hosts: {count: 2}", "baseline: edit"), "baseline is 'edit', which is none of the runs synchronous, diloco"),
        (("runs:", "runs: 5\nrun:"), "run is not a key"),
        (("runs:", "runs: [\n"), "can't be read as a comparison"),
        (("diloco:", "diloco: {replicas: 3}"), "runs.diloco has 3 replicas, one a host, but hosts.count is 2"),
        (
            ("diloco:", "diloco: {restarts: [{after_step: 5, replicas: 1}]}"),
            "runs.diloco has restarts, which conditions.slow with its pauses or kills excludes",
        ),
        (
            ("diloco:", "diloco: {restarts: [{after_step: 5, replicas: 1}, {after_step: 5, replicas: 2}]}"),
            "runs.diloco.restarts come after steps \\[5, 5\\]; give them in rising order",
        ),
        (("diloco:", "diloco: {restarts: [{after: 5, replicas: 1}]}"), "did you mean after_step"),
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


def test_delays_follow_seed_and_step_alone() -> None:
    one = Faults(seed=3, hosts=4, delays={"who": "random", "seconds": 0.5})
    for step in range(1, 50):
        assert sorted(one.delay(host, step) for host in range(4)) == [0, 0, 0, 0.5]
    victims = [next(host for host in range(4) if one.delay(host, step)) for step in range(1, 50)]
    assert set(victims) == {0, 1, 2, 3}
    again = Faults.model_validate_json(one.model_dump_json())
    assert victims == [next(host for host in range(4) if again.delay(host, step)) for step in range(1, 50)]
    always = Faults(seed=3, hosts=4, delays={"who": 2, "seconds": 0.5})
    assert [always.delay(host, 9) for host in range(4)] == [0, 0, 0.5, 0]


def test_garbage_is_of_one_host_and_its_steps() -> None:
    faults = Faults(seed=3, hosts=2, garbage={"host": 1, "first": 5, "last": 6})
    assert [step for step in range(1, 9) if faults.reads_garbage(1, step)] == [5, 6]
    assert not any(faults.reads_garbage(0, step) for step in range(1, 9))


def test_garbage_takes_the_place_of_text_and_uses_it_up() -> None:
    class Text:
        step = 0

        def next(self) -> list[torch.Tensor]:
            self.step += 1
            return [torch.full((2, 5), 1000 + self.step)]

    text = Text()
    loader = GarbageLoader(text, lambda: text.step == 2, seed=1)
    first, second, third = (loader.next()[0] for _ in range(3))
    assert (first == 1001).all() and (third == 1003).all()
    assert second.shape == (2, 5) and second.unique().numel() > 1 and second.min() >= 0 and second.max() <= 1002
