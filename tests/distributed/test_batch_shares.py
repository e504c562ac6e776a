"""Tests of training with replicas that read unequal parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from llmtrain.config import Recipe
from llmtrain.parallel.torch_engine import TorchEngine
from llmtrain.train.run_dir import RunDirectory
from tests.distributed.pool import RankPool
from tests.distributed.reshard_runs import recipe_of, write_texts
from tests.distributed.stored_runs import STEPS, STOPPED_AFTER, train
from tests.end_to_end.runs import exact, lines_of

KEYS = (*STEPS, "train.global_batch=8", "train.micro_batch=1", "parallel.precision=fp64")
UNEQUAL = "train.batch_shares=[3, 1]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with the texts of the runs."""
    folder = tmp_path_factory.mktemp("shares")
    write_texts(folder)
    return folder


def trained(ranks: RankPool, folder: Path, name: str, *overrides: str, stops: Sequence[int | None] = (None,)) -> Path:
    """Train a run on two replicas, with a stop after each of the steps `stops`, and return its folder."""
    recipe = recipe_of(folder, name, *KEYS, *overrides)
    for stop in stops:
        assert ranks.run(train, recipe, (2, 1), stop, world_size=2) == ["signal" if stop else "done"] * 2
    return RunDirectory(recipe).path


def test_synchronous_training_is_the_same_with_any_shares(ranks: RankPool, folder: Path) -> None:
    keys = ("sync.method=synchronous", "sync.period={kind: every_step}")
    runs = [trained(ranks, folder, *run, *keys) for run in (("equal",), ("unequal", UNEQUAL))]
    equal, unequal = ([line for line in lines_of(run) if "train/loss" in line] for run in runs)
    assert equal[-1]["step"] == 13
    for key in ("train/loss", "train/grad_norm"):
        assert [line[key] for line in unequal] == pytest.approx([line[key] for line in equal], rel=1e-9)


def tokens_of(recipe: Recipe) -> tuple[list[float], int]:
    """Train on this rank. Return the number of tokens by which each step divides the loss, and the sequence length."""
    divisors, forward_backward = [], TorchEngine.forward_backward

    def seen(engine: TorchEngine, batches: list, tokens: float) -> object:
        divisors.append(tokens)
        return forward_backward(engine, batches, tokens)

    with mock.patch.object(TorchEngine, "forward_backward", seen):
        train(recipe, (2, 1), None)
    return divisors, recipe.train.sequence_length


def test_a_local_step_divides_by_the_replicas_own_tokens(ranks: RankPool, folder: Path) -> None:
    recipe = recipe_of(folder, "local", *KEYS, "sync.method=local_sgd", "sync.period.every=4", UNEQUAL)
    for own, (divisors, length) in zip((6, 2), ranks.run(tokens_of, recipe, world_size=2), strict=True):
        assert divisors == [4 * length] * 2 + [own * length] * 11, "two synchronous steps, then local ones"


def test_a_run_resumes_with_its_shares_and_with_others(ranks: RankPool, folder: Path) -> None:
    keys = ("sync.method=diloco", "sync.period.every=4", UNEQUAL)
    whole = lines_of(trained(ranks, folder, "whole", *keys))
    resumed = lines_of(trained(ranks, folder, "resumed", *keys, stops=(STOPPED_AFTER, None)))
    assert [exact(line) for line in resumed] == [exact(line) for line in whole]
    trained(ranks, folder, "other", *keys, stops=(STOPPED_AFTER,))
    other = lines_of(trained(ranks, folder, "other", *keys, "train.batch_shares=[1, 3]"))
    assert other[-1]["step"] == 13
