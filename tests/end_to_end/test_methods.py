"""Tests of methods from the command line: with messages in flight between steps, with replicas that do not keep step,
and with an odd number of shards."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import TOKENS_A_STEP, Runs, forget_after, losses, summary


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


RESUMED = {
    "streaming_diloco": [
        "sync.schedule={steps: 2, fragments: 3}",
        "sync.period.every=6",
        "sync.wire.error_feedback=true",
    ],
    "co2": ["sync.period.every=5"],
    "palsgd": ["sync.schedule=layerwise", "sync.pull.probability=0.4"],
}
TRUE_LENGTH = ["parallel.shards=2", "train.steps=24", "checkpoint.every=6"]


@pytest.fixture
def whole(runs: Runs, method: str, length: list[str], step: int) -> list[dict]:
    """Return the exact values in the metrics of an undisturbed run."""
    code, output = runs.run(f"{method}-{step}", f"sync.method={method}", *RESUMED[method], *length)
    assert code == 0, output
    return runs.exact(f"{method}-{step}")


@pytest.mark.parametrize(
    ("method", "length", "step"),
    [
        ("streaming_diloco", ["parallel.shards=1"], 6),
        *(pytest.param(method, TRUE_LENGTH, 12, marks=pytest.mark.deep) for method in RESUMED),
    ],
)
def test_a_run_with_messages_under_way_continues_to_the_same_losses(
    runs: Runs, whole: list[dict], method: str, length: list[str], step: int
):
    name = f"{method}-{step}"
    changes = [f"sync.method={method}", *RESUMED[method], *length]
    forget_after(runs.path(name), step)
    code, output = runs.run(name, *changes)
    assert code == 0 and f"step-{step:08d}" in output, output
    assert runs.exact(name) == whole
    if method == "palsgd":
        said = summary(runs.path(name))
        assert said["steps"] == 24 and 10 < said["gradient_steps"] < 24
        assert said["tokens"] == said["gradient_steps"] * TOKENS_A_STEP, "a pull reads no data"
        assert runs.lines(name)[-1]["tokens"] == said["tokens"]


@pytest.mark.deep
def test_a_edit_ends_on_the_tokens_of_all_replicas(runs: Runs):
    period = "sync.period={kind: seconds, every: 0.01, min_steps: 2}"
    changes = ["sync.method=a_edit", period, "train.steps=8", "parallel.replicas=4", "parallel.shards=1"]
    code, output = runs.run("a_edit", *changes)
    assert code == 0, output
    result, lines = summary(runs.path("a_edit")), runs.lines("a_edit")
    assert result["stopped"] == "done" and result["tokens"] >= 8 * TOKENS_A_STEP
    assert result["steps"] == result["tokens"] // TOKENS_A_STEP
    assert result["gradient_steps"] * TOKENS_A_STEP == result["tokens"]
    assert result["sync_count"] > 1
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert steps == sorted(set(steps)) and steps[-1] == result["steps"]


@pytest.mark.deep
def test_wagma_trains_continues_and_stops_its_thread(runs: Runs):
    changes = ["sync.method=wagma", "parallel.replicas=4", "parallel.shards=1", *TRUE_LENGTH[1:]]
    for resumed in (False, True):
        code, output = runs.run("wagma", *changes)
        assert code == 0 and ("step-00000012" in output or not resumed), output
        first, *_, last = (line["eval/loss"] for line in runs.lines("wagma") if "eval/loss" in line)
        assert last < first - 0.3
        assert [line["step"] for line in runs.lines("wagma") if "train/loss" in line] == list(range(1, 25))
        if not resumed:
            forget_after(runs.path("wagma"), 12)


@pytest.mark.deep
def test_replicas_of_three_shards_train_as_replicas_of_one(runs: Runs):
    changes = ["sync.method=diloco", "train.global_batch=12", "train.micro_batch=1"]
    code, output = runs.run("three_shards", *changes, "parallel.replicas=2", "parallel.shards=3")
    assert code == 0 and "2 replicas x 3 shards" in output, output
    ours, theirs = losses(runs.path("three_shards")), losses(runs.reference(2, 1, *changes))
    assert ours == pytest.approx(theirs, rel=1e-4)
