"""Tests of runs that stop and continue: generators of dropout, requests to stop, steps at which something is due,
summaries, and refusals to continue."""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from llmtrain.config import Recipe
from llmtrain.errors import DONE, STOPPED_EARLY, DataError, RecipeError, TrainingError
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import check_here
from llmtrain.parallel.world import World
from llmtrain.plan.memory import checkpoint_bytes
from llmtrain.plan.model_size import size_of
from llmtrain.run_files import complete_checkpoints
from llmtrain.train.run import run_training
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.trainer import Trainer
from tests.distributed.fake_engine import choices
from tests.distributed.pairs_runs import train_and_resume
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, Case, train
from tests.distributed.reshard_runs import Part, Seen, fit, recipe_of, trainer_of, write_texts

DROPPING = GPT_NEO.model_copy(update={"config": {**GPT_NEO.config, "resid_dropout": 0.3, "embed_dropout": 0.3}})
STOPPED = 1
"""The rank that is asked to stop."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_texts(folder)
    return folder


def test_dropout_goes_on_where_it_was(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(choices("diloco", 2), 2, 1, DROPPING, steps=5)
    for whole, resumed in ranks.run(train_and_resume, case, 3, tmp_path, world_size=2):
        assert resumed.losses == whole.losses and resumed.norms == whole.norms
        for name, weights in whole.weights.items():
            assert torch.equal(resumed.weights[name], weights), name
    [[other], _] = ranks.run(train, [case], world_size=2)
    assert other.losses != whole.losses, "nothing was dropped"


def whole_trainer(recipe: Recipe, seconds: tuple[float, ...] = ()) -> Trainer:
    """Return this rank's trainer of a run that no request stops."""
    trainer = trainer_of(Part(recipe, 2, 1, recipe.train.total_steps + 1, seconds), Seen())
    trainer.metrics.stop.requested, trainer.recipe = False, recipe
    trainer.checkpointer.section = recipe.checkpoint
    return trainer


def stopped_on_one_rank(recipe: Recipe, step: int) -> tuple[str, int]:
    """Ask one rank to stop in `step`, and return (how the run ended, after which step)."""
    trainer = whole_trainer(recipe)
    end_step = trainer.method.end_step

    def wrapped(number: int, tokens: int) -> None:
        end_step(number, tokens)
        trainer.metrics.stop.requested |= number == step and trainer.metrics.mesh.world.rank == STOPPED

    trainer.method.end_step = wrapped
    return fit(trainer), trainer.state.step


def test_all_ranks_stop_together_when_one_is_asked_to(ranks: RankPool, folder: Path) -> None:
    keys = ("sync.method=diloco", "sync.warmup_steps=2", "train.steps=9", "log.every=2", "eval.every=null")
    recipe = recipe_of(folder, "asked", *keys)
    [first, second] = ranks.run(stopped_on_one_rank, recipe, 3, world_size=2, timeout=40)
    assert first == second == ("signal", 6), "the line of step 4 has the request; ranks read it at step 6"
    [(step, checkpoint)] = complete_checkpoints(folder / "runs/asked/checkpoints").items()
    assert step == 6
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    written = {name: one.size.numel() * one.properties.dtype.itemsize for name, one in stored.items()}
    tensors = sum(size for name, size in written.items() if "rng" not in name)
    assert checkpoint_bytes(recipe, size_of(recipe), 2) == pytest.approx(tensors, rel=0.01)


def fit_timed(recipe: Recipe, seconds: tuple[float, ...]) -> str:
    """Train with the given seconds per step, by replica, and return how the run ended."""
    return fit(whole_trainer(recipe, seconds))


def test_what_is_due_happens_though_its_step_was_passed(ranks: RankPool, folder: Path) -> None:
    """In these timed rounds, all ranks know the global step at 2, 6, 10, 14 and 16, and at no other step."""
    method = ("sync.method=a_edit", "sync.warmup_steps=2", "sync.period={kind: seconds, every: 3, min_steps: 0}")
    keys = ("train.steps=16", "log.every=3", "eval.every=4", "checkpoint.every=5", "checkpoint.keep=9")
    recipe = recipe_of(folder, "passed", *method, *keys)
    assert ranks.run(fit_timed, recipe, (0.5, 1.5), world_size=2) == ["done", "done"]
    lines = [json.loads(line) for line in (folder / "runs/passed/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 6, 10, 14, 16]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 6, 10, 14, 16]
    assert lines[1]["train/loss"] == pytest.approx(lines[0]["eval/loss"], rel=0.02), (
        "both are losses of the initial model"
    )
    assert list(complete_checkpoints(folder / "runs/passed/checkpoints")) == [6, 10, 16]


@pytest.mark.parametrize(
    "method",
    [
        ("sync.method=diloco",),
        # Its int4 message is in flight at step 6, where only half of its bytes have been sent.
        ("sync.method=streaming_diloco", "sync.period.every=4", "sync.schedule={steps: 2, fragments: 2}"),
    ],
    ids=["diloco", "streaming"],
)
def test_a_resumed_run_writes_the_lines_of_one_that_nothing_stops(
    ranks: RankPool, folder: Path, method: tuple[str, ...]
) -> None:
    """The checkpoint of step 6 comes between the lines of steps 4 and 8, and has a line of its own."""
    run, keys = f"line-{len(method)}", ("sync.warmup_steps=2", "train.steps=8", "log.every=4")
    recipe = recipe_of(folder, run, *method, *keys, "checkpoint.every=3", "eval.every=null")

    def lines() -> list[dict[str, float]]:
        assert ranks.run(fit_timed, recipe, (), world_size=2) == ["done", "done"]
        logged = (line for line in map(json.loads, metrics.read_text().splitlines()) if "train/loss" in line)
        return [{key: line[key] for key in keys_of_lines} for line in logged]

    keys_of_lines = "step", "tokens", "train/loss", "train/grad_norm", "comm/bytes_total"
    metrics, checkpoints = folder / "runs" / run / "metrics.jsonl", folder / "runs" / run / "checkpoints"
    uninterrupted = lines()
    assert [line["step"] for line in uninterrupted] == [1, 3, 4, 6, 8]
    assert list(complete_checkpoints(checkpoints)) == [3, 6, 8]
    shutil.rmtree(complete_checkpoints(checkpoints)[8])
    assert lines() == uninterrupted


def test_a_run_that_goes_on_has_no_summary_until_it_ends_again(folder: Path) -> None:
    """Otherwise the old summary would describe a run that continues and is then killed."""
    directory = RunDirectory(recipe_of(folder, "killed"))
    directory.claim()
    directory.write_summary({"stopped": "signal", "steps": 3})
    assert directory.summary() is not None
    directory.claim()
    assert directory.summary() is None


def test_a_stopped_run_counts_its_tokens_up_to_the_stop(tmp_path: Path) -> None:
    """The request comes in step 4, and the run learns of it in step 6, with the line of the checkpoint."""
    write_texts(tmp_path)
    keys = ("parallel.replicas=1", "parallel.shards=1", "train.steps=9", "log.every=4", "checkpoint.every=3")
    recipe = recipe_of(tmp_path, "counted", *keys)

    def ask_in_step_4(trainer: Trainer) -> None:
        trainer.after_step.append(lambda step: setattr(trainer.metrics.stop, "requested", step >= 4))

    assert run_training(recipe, World(0, 1, 0, 1), ask_in_step_4) == STOPPED_EARLY
    summary = json.loads((tmp_path / "runs/counted/summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (6, 6 * recipe.train.tokens_per_step)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("model.config.num_hidden_layers=2", "model.config.num_hidden_layers: 1 there, 2 here"),
        ("sync.method=co2", 'sync.method: "edit" there, "co2" here, and what follows from it'),
        ("optim.kind=sgd", 'optim.kind: "adamw" there, "sgd" here'),
    ],
)
def test_a_checkpoint_of_another_recipe_is_not_continued(
    tmp_path: Path, folder: Path, change: str, problem: str
) -> None:
    """The refusal does not depend on the run directory's recipe.yaml, which is deleted."""
    keys = ("train.steps=4", "sync.warmup_steps=2", "parallel.replicas=1", "parallel.shards=1", "train.micro_batch=12")
    keys += (f"run.out_dir={tmp_path}",)
    recipe, alone = recipe_of(folder, "a", *keys), World(0, 1, 0, 1)
    assert run_training(recipe, alone) == DONE
    for file in ("recipe.yaml", "summary.json"):
        (tmp_path / "a" / file).unlink()
    with pytest.raises(RecipeError) as refused:
        run_training(recipe_of(folder, "a", *keys, change), alone)
    assert problem in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path}/a/checkpoints/step-00000004 holds a run of another recipe (")


@pytest.mark.parametrize(
    "changes",
    [
        ("parallel.activation_checkpointing=true", "parallel.loss_chunk=5", "train.micro_batch=4"),
        pytest.param(("parallel.compile=true",), marks=pytest.mark.deep),  # takes seconds
    ],
    ids=["memory", "compile"],
)
def test_what_trades_memory_for_time_changes_only_the_order_of_additions_of_a_run_that_continues(
    tmp_path: Path, folder: Path, changes: tuple[str, ...]
) -> None:
    keys = ["parallel.replicas=1", "parallel.shards=1", "parallel.precision=fp64", f"run.out_dir={tmp_path}"]
    keys += ["train.steps=4", "sync.method=diloco", "checkpoint.every=2", "log.every=1", "train.micro_batch=12"]

    def lines(*changes: str) -> list[list[float]]:
        with mock.patch("torch.compile", partial(torch.compile, backend="eager")):
            assert run_training(recipe_of(folder, "a", *keys, *changes), World(0, 1, 0, 1)) == DONE
        logged = map(json.loads, (tmp_path / "a/metrics.jsonl").read_text().splitlines())
        return [
            [line[key] for key in ("step", "train/loss", "train/grad_norm")] for line in logged if "train/loss" in line
        ]

    alone = lines()
    assert [step for step, *_ in alone] == [1, 2, 3, 4]
    shutil.rmtree(complete_checkpoints(tmp_path / "a/checkpoints")[4])
    (tmp_path / "a/summary.json").unlink()
    np.testing.assert_allclose(lines(*changes), alone, rtol=1e-11)


def test_a_start_that_fails_before_training_leaves_no_run(tmp_path: Path) -> None:
    write_texts(tmp_path)
    recipe, trainers = recipe_of(tmp_path, "failed", "parallel.replicas=1", "parallel.shards=1"), []

    def fail(trainer: Trainer) -> None:
        trainers.append(trainer)
        trainer.method.close = lambda: trainers.remove(trainer)
        raise RuntimeError("before the first step")

    with pytest.raises(RuntimeError, match="before the first step"):
        run_training(recipe, World(0, 1, 0, 1), fail)
    files = {path.name for path in (tmp_path / "runs/failed").iterdir()}
    assert files <= {".lock", ".lock.holder", "tokenizer"} and not trainers


def test_a_run_is_not_continued_on_another_text(tmp_path: Path) -> None:
    write_texts(tmp_path)
    keys = ("parallel.replicas=1", "parallel.shards=1", "checkpoint.every=4")
    first, longer = (recipe_of(tmp_path, "changed", *keys, f"train.steps={steps}") for steps in (4, 8))
    assert run_training(first, World(0, 1, 0, 1)) == DONE
    run = tmp_path / "runs/changed"
    before = {file: (run / file).read_text() for file in ("summary.json", "recipe.yaml", "metrics.jsonl")}
    (tmp_path / "train" / "zzz.txt").write_text("another file\n" * 200)
    with pytest.raises(DataError, match="the training text is not the one with which the run's checkpoint was written"):
        run_training(longer, World(0, 1, 0, 1))
    with pytest.raises(DataError, match="the training text is not the one with which the run's checkpoint was written"):
        check_here(longer, Nodes(1), per_node=1)
    assert {file: (run / file).read_text() for file in before} == before, "a refused start changes nothing"
    (tmp_path / "train" / "zzz.txt").unlink()
    assert check_here(longer, Nodes(1), per_node=1).texts.keys() == {""}

    def break_loading(trainer: Trainer) -> None:
        def load(path: Path) -> None:
            raise RuntimeError("gloo: connection closed by peer")  # as after the loss of a rank

        trainer.load = load

    with pytest.raises(TrainingError, match="lost a peer in step 0"):
        run_training(longer, World(0, 1, 0, 1), break_loading)
    assert {file: (run / file).read_text() for file in before} == before, "a start that fails changes nothing"
    assert run_training(longer, World(0, 1, 0, 1)) == DONE


def stop_groups(recipe: Recipe) -> tuple[str, list[str]]:
    """Ask a run whose replicas have background threads to stop. Return how it ended, and the threads that are left."""
    before = set(threading.enumerate())
    trainer = trainer_of(Part(recipe, 2, 1, 6), Seen())
    ended = trainer.fit()
    return ended, [thread.name for thread in set(threading.enumerate()) - before if thread.name == "group averages"]


def test_a_stopped_run_leaves_no_thread_that_waits_for_the_store(ranks: RankPool, folder: Path) -> None:
    keys = ("sync.method=wagma", "sync.warmup_steps=2", "sync.period.every=4", "train.steps=20")
    assert ranks.run(stop_groups, recipe_of(folder, "groups", *keys), world_size=2) == [("signal", [])] * 2
