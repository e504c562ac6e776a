"""Tests of running comparisons: what is refused, what ends them, which trials are kept, and the time left."""

from __future__ import annotations

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.compare import runner
from llmtrain.compare.comparison import load_comparison, trials
from llmtrain.compare.runner import ComparisonProgress, run_comparison
from llmtrain.errors import STOPPED_EARLY, RecipeError
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from tests.unit.test_comparison import written

ROOT = Path(__file__).parents[2]
FILE = f"""
recipe: {ROOT}/recipes/edit_llama_stdlib.yaml
overrides: [train.steps=60]
out_dir: runs
hosts: {{count: 2}}
runs: {{synchronous: {{overrides: [sync.method=synchronous, sync.warmup_steps=0]}}, diloco: }}
"""


class Interrupted:
    """Object that sends a signal when it is deleted. Python reports an exception there but drops it, as it does in
    callbacks of its import system."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_python_drops_ends_it_before_the_next_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    file, made = tmp_path / "small.yaml", []

    def make(planned: Any, *_: Any) -> Any:
        made.append(planned.run)
        return SimpleNamespace(wall_seconds=1.0, state="done", last_lines=[], missed=[], is_disturbed=False)

    def report(*_: Any) -> Path:
        if len(made) == 1:
            Interrupted(number)
        return tmp_path

    file.write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_make", make)
    monkeypatch.setattr(runner, "write_report", report)
    monkeypatch.setattr(runner, "_results", lambda *_: None)
    monkeypatch.setattr(runner, "_seconds_left", lambda *_: 0.0)
    monkeypatch.setattr(runner, "prepare_texts", lambda *_, **__: {"": SimpleNamespace(vocab_size=400)})
    monkeypatch.setattr(runner, "recipe_warnings", lambda *_: ["what a run says"])
    before = signal.getsignal(number)
    assert runner.run_comparison(file, (), shaping=False, retry=False) == STOPPED_EARLY
    said = capsys.readouterr().out
    assert made == ["synchronous"] and "start the same command again" in said
    assert said.count("warning: runs.diloco: what a run says") == said.count("warning: runs.synchronous") == 1
    assert signal.getsignal(number) is before


def test_the_time_left_includes_trials_to_repeat_and_no_failure_shortens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each trial takes 600 seconds, unless it fails, which takes two."""
    file, failing = tmp_path / "small.yaml", {("synchronous", 1), ("synchronous", 2), ("diloco", 2)}

    def make(planned: Any, *_: Any) -> Any:
        state, seconds = ("failed", 2.0) if (planned.run, planned.seed) in failing else ("done", 600.0)
        planned.directory.mkdir(parents=True, exist_ok=True)
        (planned.directory / "trial.json").write_text(json.dumps({"state": state, "wall_seconds": seconds}))
        return SimpleNamespace(wall_seconds=seconds, state=state, last_lines=[], missed=[], is_disturbed=False)

    def times_left(retry: bool) -> list[str]:
        runner.run_comparison(file, (), shaping=False, retry=retry)
        ends = [line for line in capsys.readouterr().out.splitlines() if "done in" in line or "failed in" in line]
        return [end.partition("; ")[2] for end in ends]

    file.write_text(FILE + "seeds: [1, 2]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_make", make)
    monkeypatch.setattr(runner, "write_report", lambda *_: tmp_path)
    monkeypatch.setattr(runner, "_results", lambda *_: None)
    monkeypatch.setattr(runner, "prepare_texts", lambda *_, **__: {"": SimpleNamespace(vocab_size=400)})
    assert times_left(retry=False) == ["", "about 20.0 min left", "about 10.0 min left", ""], (
        "a failed trial alone gives no estimate"
    )
    failing.clear()
    assert times_left(retry=True) == ["about 20.0 min left", "about 10.0 min left", ""]


def test_a_trials_packets_are_lost_by_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "comparison.yaml"
    file.write_text(f"{FILE}seeds: [1, 7]\nconditions: {{lossy: {{loss: 0.01}}}}\n")
    comparison, made = load_comparison(file), []
    monkeypatch.setattr(runner, "virtual_cluster", lambda _, seed: nullcontext(made.append(seed)))
    monkeypatch.setattr(runner, "TrialRun", lambda *_: SimpleNamespace(run=lambda: None))
    for planned in trials(comparison, file):
        runner._make(planned, comparison, None, True, SimpleNamespace(show_step=None))
    assert made == [1, 1, 7, 7]


ONE = f"""
recipe: {ROOT}/recipes/edit_llama_stdlib.yaml
hosts: {{count: 2}}
runs: {{diloco: {{overrides: [sync.warmup_steps=2]}}}}
"""


@pytest.fixture
def goes_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a comparison as soon as it needs data."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "prepare_texts", interrupted)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("goes_no_further")
def test_a_comparison_needs_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "why_no_cluster", lambda: "network namespaces need root")
    message = (
        r"^virtual hosts can't be created here: network namespaces need root; or compare on loopback, .*: --no-shaping$"
    )
    with pytest.raises(RecipeError, match=message):
        runner.run_comparison(written(tmp_path, ONE))


@pytest.mark.usefixtures("goes_no_further")
def test_a_recipe_that_is_refused_is_a_runs(tmp_path: Path) -> None:
    file = written(tmp_path, ONE.replace("warmup_steps", "warmup_step"))
    with pytest.raises(RecipeError, match=r"^runs\.diloco: sync\.warmup_step .*did you mean .*warmup_steps"):
        runner.run_comparison(file, shaping=False)


@pytest.mark.usefixtures("goes_no_further")
def test_garbage_begins_before_a_runs_end(tmp_path: Path) -> None:
    file = written(tmp_path, ONE + "conditions: {bad: {garbage: {host: 1, first: 61, last: 99}}}\n")
    with pytest.raises(
        RecipeError, match=r"^runs\.diloco: conditions\.bad\.garbage begins in step 61, .* has 60 steps"
    ):
        runner.run_comparison(file, ["train.steps=60"], shaping=False)
    assert runner.run_comparison(file, ["train.steps=61"], shaping=False) == STOPPED_EARLY


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
    [
        ((), ("train.steps=30",), "train.steps=30 here"),
        (("train.steps=30",), (), "train.steps=30 there"),
        (("train.steps=30",), ("train.steps=31",), "train.steps=30 there, train.steps=31 here"),
    ],
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


def test_another_suite_target_baseline_or_seed_leaves_ended_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every trial is made once, and the suite's tasks are loaded before the first trial."""
    made: list[tuple[str, int | None]] = []

    def make(planned: Any, comparison: Any, *_: Any) -> Any:
        made.append((planned.run, planned.seed))
        planned.directory.mkdir(parents=True, exist_ok=True)
        (planned.directory / "trial.json").write_text('{"state": "done", "wall_seconds": 1.0}')
        return SimpleNamespace(wall_seconds=1.0, state="done", last_lines=[], missed=[], is_disturbed=False)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_make", make)
    monkeypatch.setattr(runner, "check_benchmarks", lambda _: None)
    monkeypatch.setattr(runner, "fetch_tasks", lambda suite, *_: made.append((suite and suite.name, None)))
    monkeypatch.setattr(runner, "evaluate_trials", lambda *_: True)
    monkeypatch.setattr(runner, "write_report", lambda *_: tmp_path)
    monkeypatch.setattr(runner, "_results", lambda *_: SimpleNamespace(baseline="diloco"))
    monkeypatch.setattr(runner, "prepare_texts", lambda *_, **__: {"": SimpleNamespace(vocab_size=400)})

    def made_with(keys: str, file: str = FILE) -> list[tuple[str, int | None]]:
        made.clear()
        assert runner.run_comparison(written(tmp_path, file + keys), shaping=False) == 0
        return list(made)

    both = [("synchronous", 1), ("diloco", 1)]
    assert made_with("seeds: [1]\nsuite: small\n") == [("small", None), *both]
    assert made_with("seeds: [1]\nsuite: offline\n") == []
    assert made_with("seeds: [1]\ntarget: {loss: 3.5}\nbaseline: diloco\n") == []
    assert made_with("seeds: [1, 2]\n") == [(None, None), ("synchronous", 2), ("diloco", 2)]
    assert "- 2" in (tmp_path / "runs" / "small" / "comparison.yaml").read_text(), "the last start's file is stored"
    with pytest.raises(RecipeError, match=r"another version of this comparison \(count: 2 there, count: 4 here\)"):
        made_with("seeds: [1]\n", FILE.replace("count: 2", "count: 4"))
    assert "count: 2" in (tmp_path / "runs" / "small" / "comparison.yaml").read_text()


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
    """A change of the recipe file, or of whether limits apply, is refused. Trials that are repeated are not compared."""
    monkeypatch.setattr(runner, "why_no_cluster", lambda: None)
    recipe, file = (
        tmp_path / "recipe.yaml",
        written(tmp_path, "recipe: recipe.yaml\nruns: {edit: }\nseeds: [1, 2]\n"),
    )
    recipe.write_text(f"base: {ROOT}/recipes/edit_llama_stdlib.yaml\n")
    first, second = trials(load_comparison(file), file)
    for one, state, words in ((first, "done", "on loopback, without limits"), (second, "failed", None)):
        one.directory.mkdir(parents=True)
        stored = load_recipe(one.recipe, (*one.overrides, "parallel.replicas=2"))  # as in a run's last stage
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
    (first.directory / "recipe.yaml").unlink()  # as after a run that failed before it wrote its recipe
    assert outcome().startswith(other.format(f"2: optim.lr: {lr} there, 0.0123 here"))
    (second.directory / "recipe.yaml").write_text("optim: {momentum: 1}\n")
    assert "optim.momentum is not a key" in outcome()
    assert outcome(retry=True) == STOPPED_EARLY


@pytest.mark.usefixtures("goes_no_further")
@pytest.mark.parametrize(
    ("hosts", "shaping", "warned"),
    [
        ("{count: 4, cpus: 0.5}", True, {"wide": "2.5"}),
        ("{count: 4, cpus: 0.6}", True, {"plain": "2.4", "wide": "2.8"}),
        ("{count: 2, processes: 2}", True, {"plain": "4", "wide": "3"}),
        ("{count: 2}", True, {}),
        ("{count: 4}", False, {}),
    ],
    ids=["one condition", "all", "without limits", "enough", "loopback"],
)
def test_hosts_that_want_more_cores_than_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hosts: str,
    shaping: bool,
    warned: dict[str, str],
) -> None:
    monkeypatch.setattr(runner, "usable_cores", lambda: 2)
    monkeypatch.setattr(runner, "why_no_cluster", lambda: None)
    text = FILE.replace("{count: 2}", hosts) + "conditions: {plain: , wide: {hosts: {1: {cpus: 1}}}}\n"
    assert runner.run_comparison(written(tmp_path, text), shaping=shaping) == STOPPED_EARLY
    lines = [line for line in capsys.readouterr().out.splitlines() if "cores together" in line]
    assert len(lines) == len(warned)
    for line, (name, cpus) in zip(lines, warned.items(), strict=True):
        assert line.startswith(
            f"warning: conditions.{name}: the hosts use up to {cpus} cores together, and this machine has 2"
        )


def test_a_folder_that_can_not_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    file = tmp_path / "small.yaml"
    file.write_text(
        f"recipe: {ROOT}/recipes/quickstart.yaml\nout_dir: {tmp_path}/taken\nhosts: {{count: 2}}\nruns: {{plain: }}"
    )
    with pytest.raises(RecipeError, match=r"^out_dir: .*taken/small can't be written \(.*\); give another folder$"):
        run_comparison(file, shaping=False)


def test_a_comparison_has_a_bar_for_all_trials_and_one_for_this_one(
    terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = SimpleNamespace(condition="thin", run="diloco", seed=7)
    record = SimpleNamespace(
        state="failed",
        wall_seconds=75.0,
        last_lines=["the reason"],
        missed=["the death of host 1"],
        is_disturbed=True,
        other_load=0.31,
    )
    with ComparisonProgress(total=3, missing=2) as bars:
        bars.begin(planned, 60)
        bars.show_step(30)
        bars.end(record, 3700.0)
    shown = capsys.readouterr().out
    assert "2/3" in shown and "30/60" in shown
    assert "thin · diloco · seed 7: failed in 75 s; about 61.7 min left" in shown and "the reason" in shown
    assert "warning: it ended before the death of host 1" in shown
    assert "warning: other programs took 31 % of the machine's CPU time" in shown
