"""Tests of training on documents without packing, from the command line."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import Runs, forget_after, summary

DOCUMENTS = ["data.packing=none", r'data.separator="\n\n"', "train.global_batch=8", "train.micro_batch=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def test_a_run_continues_to_the_same_losses_and_counts_real_tokens(runs: Runs) -> None:
    code, output = runs.train("whole", *DOCUMENTS)
    assert code == 0 and "12 steps of at most 256 tokens" in output and " documents, " in output, output
    whole, lines = runs.exact("whole"), runs.lines("whole")
    trained = [line for line in lines if "train/loss" in line]
    padding = [line.get("data/padding", 0.0) for line in trained]  # a line without padding lacks the tag
    assert 0 < max(padding) < 0.5
    tokens = [line["tokens"] for line in trained]
    steps = {after - before for before, after in zip([0, *tokens], tokens, strict=False)}
    assert len(steps) > 3 and max(steps) <= 8 * 32
    assert summary(runs.path("whole"))["tokens"] == tokens[-1]
    forget_after(runs.path("whole"), 6)
    code, output = runs.train("whole", *DOCUMENTS)
    assert code == 0 and "step-00000006" in output, output
    assert runs.exact("whole") == whole


@pytest.mark.deep
def test_wait_avoiding_replicas_train_on_documents(runs: Runs) -> None:
    if not runs.path("whole").exists():
        runs.train("whole", *DOCUMENTS)
    changes = ["sync.method=wagma", "sync.period.every=4", "parallel.replicas=4", "parallel.shards=1"]
    code, output = runs.run("wagma", *DOCUMENTS, *changes)
    assert code == 0, output
    steps = [next(line for line in runs.lines(name) if line["step"] == 1) for name in ("whole", "wagma")]
    for tag in ("train/loss", "train/grad_norm"):  # step 1 is a synchronous step of the warm-up, on both meshes
        assert steps[0][tag] == pytest.approx(steps[1][tag], rel=1e-5), tag
    losses = [line["eval/loss"] for line in runs.lines("wagma") if "eval/loss" in line]
    assert losses[-1] < losses[0] - 0.1
    assert summary(runs.path("wagma"))["sync_count"] > 1
