"""Comparison files: what is planned, in which order, and what is refused; the faults that ranks inject."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from llmtrain.compare import faults, runner
from llmtrain.compare.comparison import ConditionSection, load_comparison, trials
from llmtrain.compare.faults import Faults, GarbageLoader, inject
from llmtrain.errors import STOPPED_EARLY, RecipeError
from llmtrain.loss import IGNORE_INDEX
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe, resolved_yaml

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
  elastic: {replicas: 2, restarts: [{after_step: 60, replicas: 4}, {after_step: 120, replicas: 1}]}
"""
    (planned,) = trials(load_comparison(written(tmp_path, text)), tmp_path / "small.yaml")
    assert [(stage.replicas, stage.until) for stage in planned.stages] == [(2, 60), (4, 120), (1, None)]
    assert "parallel.replicas=2" in planned.overrides
    assert planned.overrides_of(planned.stages[1]) == (*planned.overrides, "parallel.replicas=4")


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
        (("hosts: {count: 2}", "baseline: edit"), "baseline is 'edit', which is none of the runs synchronous, diloco"),
        (("runs:", "runs: 5\nrun:"), "run is not a key"),
        (("runs:", "runs: [\n"), "can't be read as a comparison"),
        (("runs:", "? \nruns:"), "a key is not a word or a number"),
        (("diloco:", "diloco: {replicas: 3}"), "runs.diloco has 3 replicas, one per host, but hosts.count is 2"),
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


def test_delays_follow_seed_and_step_alone() -> None:
    one = Faults(seed=3, hosts=4, delays={"host": "random", "seconds": 0.5})
    for step in range(1, 50):
        assert sorted(one.delay(host, step) for host in range(4)) == [0, 0, 0, 0.5]
    victims = [next(host for host in range(4) if one.delay(host, step)) for step in range(1, 50)]
    assert set(victims) == {0, 1, 2, 3}
    again = Faults.model_validate_json(one.model_dump_json())
    assert victims == [next(host for host in range(4) if again.delay(host, step)) for step in range(1, 50)]
    always = Faults(seed=3, hosts=4, delays={"host": 2, "seconds": 0.5})
    assert [always.delay(host, 9) for host in range(4)] == [0, 0, 0.5, 0]


def test_garbage_is_of_one_host_and_its_steps() -> None:
    faults = Faults(seed=3, hosts=2, garbage={"host": 1, "first": 5, "last": 6})
    assert [step for step in range(1, 9) if faults.reads_garbage(1, step)] == [5, 6]
    assert not any(faults.reads_garbage(0, step) for step in range(1, 9))


class Text:
    """A loader whose n-th batch is full of 1000 + n."""

    step = 0

    def next(self) -> list[torch.Tensor]:
        self.step += 1
        return [torch.full((2, 5), 1000 + self.step)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def test_garbage_takes_the_place_of_text_and_uses_it_up() -> None:
    text = Text()
    loader = GarbageLoader(text, lambda: text.step == 2, seed=1)
    first, second, third = (loader.next()[0] for _ in range(3))
    assert (first == 1001).all() and (third == 1003).all()
    assert second.shape == (2, 5) and second.unique().numel() > 1 and second.min() >= 0 and second.max() <= 1002


def test_garbage_leaves_padding_where_it_is() -> None:
    text = Text()
    padded = torch.full((2, 5), 40)
    padded[1, 3:] = IGNORE_INDEX
    text.next = lambda: [padded]
    (garbage,) = GarbageLoader(text, lambda: True, seed=1).next()
    assert torch.equal(garbage == IGNORE_INDEX, padded == IGNORE_INDEX) and garbage.unique().numel() > 3


def injected(host: int, **asked: Any) -> tuple[SimpleNamespace, list[Any]]:
    """A trainer on a host to which faults happen, and what it calls before each block."""
    hooks: list[Any] = []
    trainer = SimpleNamespace(
        loader=Text(), engine=SimpleNamespace(register_block_hook=hooks.append), state=SimpleNamespace(step=0)
    )
    inject(trainer, Faults(seed=3, hosts=2, **asked), host)
    return trainer, hooks


def test_a_trainer_without_faults_is_as_it_was() -> None:
    trainer, hooks = injected(host=1)
    assert type(trainer.loader) is Text and not hooks


def test_a_trainer_reads_garbage_in_its_steps_and_goes_on_from_a_checkpoint() -> None:
    trainer, hooks = injected(host=1, garbage={"host": 1, "first": 2, "last": 2})
    batches = []
    for trainer.state.step in (1, 2, 3):
        batches += trainer.loader.next()
    assert [len(batch.unique()) > 1 for batch in batches] == [False, True, False] and not hooks
    assert trainer.loader.state_dict() == {"step": 3}
    trainer.loader.load_state_dict({"step": 7})
    assert (trainer.loader.next()[0] == 1008).all()


def test_a_host_sleeps_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=slept.append))
    trainer, (before_block,) = injected(host=1, delays={"host": 1, "seconds": 0.3})
    for trainer.state.step in (1, 2):
        for block in (0, 1, 0, 1):  # two micro-batches
            before_block(block)
    assert slept == [0.3, 0.3] and type(trainer.loader) is Text


ONE = f"""
recipe: {ROOT}/recipes/edit_llama_stdlib.yaml
hosts: {{count: 2}}
runs: {{diloco: {{overrides: [sync.warmup_steps=2]}}}}
"""


@pytest.fixture
def goes_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison is interrupted as soon as it needs data."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "prepare_for", interrupted)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("goes_no_further")
def test_a_comparison_needs_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "why_no_cluster", lambda: "network namespaces need root")
    message = r"^hosts can't be made here: network namespaces need root; or compare on loopback, .*: --no-shaping$"
    with pytest.raises(RecipeError, match=message):
        runner.run_comparison(written(tmp_path, ONE))


@pytest.mark.usefixtures("goes_no_further")
def test_a_recipe_that_is_refused_is_a_runs(tmp_path: Path) -> None:
    file = written(tmp_path, ONE.replace("warmup_steps", "warmup_step"))
    with pytest.raises(RecipeError, match=r"^runs\.diloco: .*sync\.warmup_step .*did you mean .*warmup_steps"):
        runner.run_comparison(file, shaping=False)


@pytest.mark.usefixtures("goes_no_further")
@pytest.mark.parametrize(
    ("keys", "own", "refused"),
    [
        (
            [],
            "parallel.replicas=4",
            "parallel.replicas is 4 .*hosts.count and runs.diloco.replicas set it to 2; change those",
        ),
        (["parallel={replicas: 1}"], "train.steps=9", "parallel.replicas is 1 .* set it to 2"),
        (["run.seed=7"], "train.steps=9", r"run\.seed is 7 in the overrides, but seeds set it to 1234"),
        (["run.name=mine", "parallel.replicas=2"], "train.steps=9", 'run.name is "mine" .* "seed-1234"'),
        (["run.out_dir=there"], "train.steps=9", "run.out_dir .*but out_dir and name set it"),
        (["log.trace={first: 9}"], "train.steps=9", "log.trace .*but trace set it to"),
        (["parallel.replicas=2", "run.seed=1234", "log.trace=null"], "parallel.replicas=2", None),
    ],
)
def test_a_key_that_the_comparison_sets_is_no_override(
    tmp_path: Path, keys: list[str], own: str, refused: str | None
) -> None:
    file = written(tmp_path, ONE.replace("[sync", f"[{own}, sync") + "trace: {first: 3, steps: 2}\n")
    if refused is None:
        assert runner.run_comparison(file, keys, shaping=False) == STOPPED_EARLY
        return
    with pytest.raises(RecipeError, match=rf"^runs\.diloco: {refused}"):
        runner.run_comparison(file, keys, shaping=False)


@pytest.mark.usefixtures("goes_no_further")
@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [((), ("train.steps=30",), "- train.steps=30"), (("train.steps=30",), (), "a key is gone")],
)
def test_the_folder_of_another_comparison_is_not_gone_on_with(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], difference: str
) -> None:
    file = written(tmp_path, ONE)
    assert [runner.run_comparison(file, first, shaping=False) for _ in range(2)] == [STOPPED_EARLY] * 2
    with pytest.raises(RecipeError) as refused:
        runner.run_comparison(file, second, shaping=False)
    assert str(refused.value) == (
        f"runs/small belongs to another version of this comparison ({difference}); give another `name:`, or remove the folder"
    )


def test_ended_trials_of_versions_that_named_no_faults_without_limits_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(
        tmp_path,
        "recipe: edit_llama_stdlib.yaml\nruns: {edit: }\nconditions: {bad: {garbage: {host: 3, first: 1, last: 2}}}\n",
    )
    comparison = load_comparison(file)
    (trial,) = trials(comparison, file)
    trial.directory.mkdir(parents=True)
    (trial.directory / "trial.json").write_text('{"condition_in_words": "on loopback, without limits"}')
    assert [len(runner._differences(trial, None, comparison, shaping)) for shaping in (False, True)] == [0, 1]


@pytest.mark.usefixtures("goes_no_further")
def test_ended_trials_that_were_made_otherwise_are_not_mixed_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another recipe file, or with limits. What is repeated is not compared."""
    monkeypatch.setattr(runner, "why_no_cluster", lambda: None)
    recipe, file = (
        tmp_path / "recipe.yaml",
        written(tmp_path, "recipe: recipe.yaml\nruns: {edit: }\nseeds: [1, 2]\n"),
    )
    recipe.write_text(f"base: {ROOT}/recipes/edit_llama_stdlib.yaml\n")
    first, second = trials(load_comparison(file), file)
    for one, state, words in ((first, "done", "on loopback, without limits"), (second, "failed", None)):
        one.directory.mkdir(parents=True)
        stored = load_recipe(one.recipe, (*one.overrides, "parallel.replicas=2"))  # a last stage's
        (one.directory / "recipe.yaml").write_text(resolved_yaml(stored))
        record = {"state": state, **({"condition_in_words": words} if words else {})}
        (one.directory / "trial.json").write_text(json.dumps(record))

    def outcome(**options: bool) -> int | str:
        try:
            return runner.run_comparison(file, **{"shaping": False, **options})
        except RecipeError as error:
            return str(error)

    other = "runs/small belongs to another version of this comparison (plain · edit · seed {}); give another `name:`"
    assert outcome() == STOPPED_EARLY
    limits = "1: on loopback, without limits there, no limits, no faults here"
    assert outcome(shaping=True).startswith(other.format(limits))
    with recipe.open("a") as added:
        added.write("optim: {lr: 0.0123}\n")
    lr = load_recipe(first.directory / "recipe.yaml").optim.lr
    assert outcome().startswith(other.format(f"1: optim.lr: {lr} there, 0.0123 here"))
    (first.directory / "recipe.yaml").unlink()  # a run that failed before it wrote it
    assert outcome().startswith(other.format(f"2: optim.lr: {lr} there, 0.0123 here"))
    (second.directory / "recipe.yaml").write_text("optim: {momentum: 1}\n")
    assert "optim.momentum is not a key" in outcome()
    assert outcome(retry=True) == STOPPED_EARLY
