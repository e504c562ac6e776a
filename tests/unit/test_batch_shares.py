"""Tests of replicas that read unequal parts of a batch (`train.batch_shares`)."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.batch_shape import BatchShape, batch_unit
from llmtrain.data.dataset import TokenShards
from llmtrain.data.loader import Loader, PrefetchLoader
from llmtrain.data.sites import SiteLoader
from llmtrain.errors import RecipeError
from llmtrain.launch.attempts import Attempt
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import Preflight
from llmtrain.launch.torchrun import _fewer_replicas, _shared_batch
from llmtrain.plan.engine_memory import _accumulates
from llmtrain.plan.show import _accumulation
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from llmtrain.reshard import MeshChange
from llmtrain.train.run_dir import recipe_changes
from tests.unit.test_text_list import recipe

LENGTH, BATCH = 4, 24
TOKENS = TokenShards([np.arange(2400 * LENGTH + 1)])
SHARES = ((), (2, 1), (1, 2, 3), (1, 1, 2), (3, 1))


def shape_of(shares: Sequence[int], replicas: int = 0, batch: int = BATCH, shards: int = 1) -> BatchShape:
    """Return the first rank's batch shape in a run with one replica per share, or with `replicas` that read equal parts."""
    return BatchShape(LENGTH, batch, 1, 7, replicas=len(shares) or replicas, shards=shards, shares=tuple(shares))


def loaders(run: BatchShape, sites: str = "") -> list[Loader]:
    """Return the loader of each replica, all on one text, or each at the site named by its letter in `sites`."""
    shapes = [replace(run, replica=replica) for replica in range(run.replicas)]
    return [SiteLoader(TOKENS, [*sites], shape) if sites else Loader(TOKENS, shape) for shape in shapes]


def read(loader: Loader, steps: int) -> list[int]:
    """Return the samples that a rank reads in the next `steps` steps."""
    return [int(row[0]) // LENGTH for _ in range(steps) for batch in loader.next() for row in batch]


@pytest.mark.parametrize(
    ("micro_batch", "ranks", "shares", "unit"),
    [
        (2, 4, (), 8),
        (1, 2, (2, 1), 3),
        (4, 2, (2, 1), 12),
        (2, 4, (2, 1), 12),
        (4, 2, (4, 4), 8),
        (3, 3, (1, 2, 3), 18),
    ],
)
def test_the_unit_is_the_smallest_batch_of_complete_micro_batches(
    micro_batch: int, ranks: int, shares: tuple[int, ...], unit: int
) -> None:
    each, at_once = shares or (1,) * ranks, micro_batch * ranks // len(shares or range(ranks))
    fitting = [batch for batch in range(1, 100) if all(batch * share % (at_once * sum(each)) == 0 for share in each)]
    assert batch_unit(micro_batch, ranks, shares) == unit == fitting[0]
    assert all(batch % unit == 0 for batch in fitting)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("shares", SHARES[1:])
def test_parts_are_by_share_and_make_up_the_batch(shares: tuple[int, ...], shards: int) -> None:
    run, indices = shape_of(shares, batch=48, shards=shards), []
    for replica, share in enumerate(shares):
        ranks = [replace(run, replica=replica, shard_rank=rank) for rank in range(shards)]
        assert len(ranks[0].part) == 48 * share // sum(shares)
        assert ranks[0].relative_part == pytest.approx(share * len(shares) / sum(shares))
        indices += [index for rank in ranks for index in range(rank.first, rank.first + rank.per_rank)]
    assert indices == list(range(48))


def test_replicas_read_their_parts_of_the_same_order() -> None:
    plain, unequal = loaders(shape_of((), 1))[0], loaders(shape_of((2, 1)))
    for _ in range(5):
        assert read(plain, 1) == [sample for loader in unequal for sample in read(loader, 1)]
    assert [len(loader.next()) for loader in unequal] == [16, 8]


def test_a_loader_knows_the_mean_of_all_replicas_and_its_own_part() -> None:
    for loader, own in zip(loaders(shape_of((2, 1))), (16, 8), strict=True):
        ahead = PrefetchLoader(loader, timeout_seconds=10)
        ahead.next()
        assert (ahead.mean_replica_tokens, ahead.relative_part) == (12 * LENGTH, own / 12)
    first, *_, last = loaders(shape_of((2, 1, 1)), sites="ABA")
    assert (first.mean_replica_tokens, first.relative_part) == (8 * LENGTH, 1.5)
    assert (last.mean_replica_tokens, last.relative_part) == (8 * LENGTH, 0.75)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sites", ["", "AAB"])
def test_each_sample_comes_once_whatever_the_shares_become(seed: int, sites: str) -> None:
    drawn, seen, batch, run = random.Random(seed), Counter(), BATCH, shape_of((1, 2, 3))
    ranks, at = loaders(run, sites), sites
    for _ in range(5):
        for replica, rank in enumerate(ranks):
            seen.update((at[replica] if at else "", sample) for sample in read(rank, drawn.randrange(4)))
        states = [{"loader": json.loads(json.dumps(rank.state_dict()))} for rank in ranks]
        shares = drawn.choice(SHARES)
        old_replicas, old_batch, batch = run.replicas, batch, drawn.choice([BATCH, 2 * BATCH])
        run = shape_of(shares, 2, batch)
        at = "".join(drawn.choices("AB", k=run.replicas)) if sites else ""
        ranks = loaders(run, at)
        for replica, rank in enumerate(ranks):
            changed = None if batch == old_batch else old_batch
            change = MeshChange(old_replicas, 1, run.replicas, 1, replica, 0, 0, changed)
            rank.load_state_dict(change.apply({"loader": rank.reshard_rule()}, states)["loader"])
    assert set(seen.values()) == {1}
    if not sites:
        skipped = {("", ranks[0].order.sample(entry)) for entry in range(ranks[0].cursor.lowest)} - seen.keys()
        assert not skipped


@pytest.mark.parametrize("sites", ["", "ABA"])
def test_the_same_shares_go_on_exactly_and_others_begin_together(sites: str) -> None:
    run = shape_of((1, 2, 3))
    first, straight = loaders(run, sites), loaders(run, sites)
    for replica, steps in enumerate((4, 9, 6)):
        read(first[replica], steps), read(straight[replica], steps)
    values = [{"loader": rank.state_dict()} for rank in first]
    for shares, is_same in (((1, 2, 3), True), ((3, 2, 1), False), ((), False)):
        ranks = loaders(shape_of(shares, 3), sites)
        for replica, rank in enumerate(ranks):
            change = MeshChange(3, 1, 3, 1, replica, 0)
            rank.load_state_dict(change.apply({"loader": rank.reshard_rule()}, values)["loader"])
        assert ([rank.cursor.num_read for rank in ranks] == [rank.cursor.num_read for rank in first]) == is_same
        if is_same:
            assert [read(rank, 3) for rank in ranks] == [read(rank, 3) for rank in straight]


KEYS = ("train.micro_batch=4", "parallel.replicas=2", "parallel.shards=1")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (("train.batch_shares=[2, 1, 1]",), ["has 3 shares, but the run has 2 replicas", "give one for each"]),
        (("train.batch_shares=[2]",), ["has 1 share, but the run has 2 replicas"]),
        (
            ("train.batch_shares=[2, 1]", "train.global_batch=32"),
            ["global_batch is 32", "batch_shares=[2, 1]", "micro-batches of 4 x 1 shard", "24 or 36"],
        ),
    ],
)
def test_shares_that_do_not_fit_are_one_line(keys: tuple[str, ...], parts: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        check(recipe(*KEYS, *keys), 2)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_make_no_such_number_of_replicas_are_one_line(ranks: int) -> None:
    """With the default mesh, only the shares determine the number of replicas."""
    with pytest.raises(RecipeError, match=rf"has 2 shares, one for each replica, but {ranks} ranks? can't be divided"):
        check(recipe("train.batch_shares=[2, 1]"), ranks)


def test_a_run_may_continue_with_other_shares() -> None:
    one, other = (
        recipe(*KEYS, "train.global_batch=24", f"train.batch_shares={shares}") for shares in ("[2, 1]", "[1, 2]")
    )
    check(one, 2)
    assert recipe_changes(one, other) == []


def test_more_than_one_micro_batch_of_any_replica_accumulates() -> None:
    one = recipe(*KEYS, "train.global_batch=12", "train.batch_shares=[2, 1]")
    assert _accumulation(one, 2, 1) == "2, 1" and _accumulates(one, 2, 1)
    assert _accumulation(one, 3, 1) == "1" and not _accumulates(one, 3, 1), "these shares are of two replicas"
    assert _accumulation(one, 2, 2) == "uneven"


def test_a_node_that_is_left_stays_one_replica(tmp_path: Path) -> None:
    """Otherwise, its ranks would become several replicas, which have no shares."""
    (path := tmp_path / "recipe.yaml").write_text(
        "train: {steps: 2000, micro_batch: 1, global_batch: 24, batch_shares: [2, 1]}"
    )
    start = Preflight(processes=4, replicas=2, shards=2, reason="", memory=0)
    fewer = _fewer_replicas(load_recipe(path), path, start, Nodes(2, 0), Attempt(1, Nodes(1, 0), (0,)))
    assert fewer == ["parallel.replicas=auto", "parallel.shards=2", "train.batch_shares=[2]"]


def test_replicas_that_are_left_keep_their_shares() -> None:
    one = recipe("train.micro_batch=1", "train.global_batch=24", "train.batch_shares=[3, 1, 2]", "train.steps=9")
    assert _shared_batch(one, 2, [0, 1]) == ["train.batch_shares=[3, 1]"]
    assert _shared_batch(one, 2, [0, 2]) == [
        "train.batch_shares=[3, 2]",
        "train.global_batch=20",
        "train.tokens=null",
        "train.steps=9",
    ]
    assert _shared_batch(recipe("train.global_batch=24", "train.micro_batch=1"), 3, [0, 1, 2]) == []
