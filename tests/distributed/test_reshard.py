"""Tests of runs that continue on another mesh: the same replicas unchanged, others by the rules of docs/resume.md."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.config import Recipe
from tests.distributed.pool import RankPool
from tests.distributed.reshard_rules import assert_follows_the_rules, newest, of_replicas, read_checkpoint, shared
from tests.distributed.reshard_runs import Part, Seen, recipe_of, refusal, rewrite, run_parts, write_texts

EDIT = ("sync.method=edit", "sync.reduction={z: 3, ema: 0.3, min_rounds: 2, temperature: 1, clip: 10}")
TIMED = ("sync.method=a_edit", "sync.reduction={ema: 0.3, clip: 10}", "sync.period={kind: seconds, every: 3}")
METHODS = {
    "diloco": ("sync.method=diloco",),
    "diloco-feedback": ("sync.method=diloco", "sync.wire={kind: int4, error_feedback: true}"),
    "edit-armed": EDIT,
    "local_sgd": ("sync.method=local_sgd",),
    "streaming": ("sync.method=streaming_diloco", "sync.wire=fp32", "sync.schedule={steps: 2, fragments: 2}"),
    "streaming-weighed": (
        *("sync.method=streaming_diloco", "sync.wire=fp32", "sync.schedule={steps: 3, fragments: 2}"),
        "sync.reduction={kind: edit_penalty, z: 3, ema: 0.3, min_rounds: 2}",
    ),
    "co2": ("sync.method=co2",),
    "palsgd": ("sync.method=palsgd", "sync.pull.probability=0.5"),
    "wagma": ("sync.method=wagma",),
    "des_loc": ("sync.method=des_loc", "sync.moments={first: 1, second: 3}"),
    "gpa": ("sync.method=gpa", "sync.outer.decay=0.8"),
    "tokens": (
        *("sync.method=streaming_diloco", "sync.wire=fp32", "sync.schedule={steps: 3, fragments: 2}"),
        *("sync.reduction=token_weighted", "data.packing=none"),
    ),
}
STEP = {"edit-armed": 10, "streaming-weighed": 8}
"""Steps of checkpoints that are not at step 9, within a round. Two synchronous steps come first, then rounds of four.
After step 8, the weights of one fragment are being exchanged, and the mean of the other is in flight."""


FAST = ["edit-armed", "streaming-weighed", "wagma"]
"""Methods with state that the others lack: a penalty, messages that are not sent yet, means in flight, groups."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with a little real text, from the standard library's source."""
    folder = tmp_path_factory.mktemp("reshape")
    write_texts(folder)
    return folder


def overrides(kind: str) -> tuple[str, ...]:
    """Return a method's overrides. `sync.period.every` and all other keys are those of the tiny recipe."""
    return (*METHODS[kind], "sync.warmup_steps=2")


def run(ranks: RankPool, *parts: Part) -> list[list[Seen]]:
    """Run the parts, all on one mesh, and return what their ranks saw: [part][rank]."""
    size = parts[0].replicas * parts[0].shard
    return list(map(list, zip(*ranks.run(run_parts, list(parts), world_size=size, timeout=600), strict=True)))


def lines(recipe: Recipe) -> list[dict[str, Any]]:
    path = Path(recipe.run.out_dir) / recipe.run.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(seen: list[Seen]) -> str:
    """Return the console's description of the checkpoint from which a part continued."""
    [line] = [note for note in seen[0].notes if note.startswith("continuing from")]
    return line.rpartition("/")[2]


def checkpoints(folder: Path, name: str) -> Path:
    return folder / "runs" / name / "checkpoints"


TAGS = ("train/", "eval/", "sync/")


@pytest.mark.parametrize(
    "kind",
    [
        "edit-armed",
        *(
            pytest.param(kind, marks=pytest.mark.deep)
            for kind in ("streaming-weighed", "streaming", "palsgd", "des_loc", "gpa", "tokens")
        ),
    ],
)
def test_the_same_replicas_on_other_shards_go_on_as_if_nothing_had_happened(
    ranks: RankPool, folder: Path, kind: str
) -> None:
    """The runs are in float64, and differ only in the order of additions."""
    alone, moved = (
        recipe_of(folder, f"{name}-{kind}", *overrides(kind), "train.steps=14") for name in ("alone", "moved")
    )
    run(ranks, *(Part(recipe, 2, 1, 10) for recipe in (alone, moved)))
    run(ranks, Part(alone, 2, 1, 14))
    [seen] = run(ranks, Part(moved, 2, 2, 14))
    assert said(seen) == "step-00000010, written by 2 replicas x 1 shard: the same replicas on 2 shards"
    assert [line["step"] for line in lines(moved)] == [0, 1, 10, 14, 14]
    for ours, theirs in zip(lines(moved), lines(alone), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        numbers = {tag: value for tag, value in theirs.items() if tag.startswith(TAGS)}
        assert {tag: ours[tag] for tag in numbers} == pytest.approx(numbers, rel=1e-10, abs=1e-13)
        if "comm/bytes_total" in ours:  # every rank of a replica also sends small messages
            assert ours["comm/bytes_total"] == pytest.approx(theirs["comm/bytes_total"], rel=0.01)


IN_OTHERS = {"wagma": 4}
"""Number of replicas that continue, if it is not three. WAGMA's groups need a power of two."""


SHARED = {
    "wagma": {"anchor"},
    "streaming-weighed": {"anchor", "momentum", "arriving"},
    "co2": {"anchor", "momentum", "arriving"},
}
"""Kinds of tensors that replicas share, if they are not just anchor and momentum."""


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.deep) for kind in METHODS]
)
def test_other_replicas_start_by_the_rules(ranks: RankPool, folder: Path, kind: str) -> None:
    recipe, rewritten = recipe_of(folder, f"mean-{kind}", *overrides(kind)), folder / f"rewritten-{kind}"
    run(ranks, Part(recipe, 2, 2, STEP.get(kind, 9)))
    replicas = IN_OTHERS.get(kind, 3)
    expected = f", written by 2 replicas x 2 shards: {replicas} replicas start from their mean"
    parts = [(Part(recipe, replicas, 1, 99), rewritten)]
    assert ranks.run(rewrite, parts, world_size=replicas, timeout=600) == [[expected]] * replicas
    old, got = (read_checkpoint(newest(path)) for path in (checkpoints(folder, f"mean-{kind}"), rewritten))
    first, second = (replica["optimizer.causal_lm.lm_head.weight.exp_avg"] for replica in of_replicas(old))
    assert np.abs(first - second).max() > 1e-6, "the replicas do not differ, so their mean proves nothing"
    assert_follows_the_rules(got, old, rtol=1e-13)
    kept = [state["method"]["schedule"] for state in (old.state["ranks"][0], *got.state["ranks"])]
    if kind == "tokens":
        in_rounds = [_pop_tokens(state["method"]["schedule"]) for state in (*old.state["ranks"], *got.state["ranks"])]
        of_replica = (np.sum(in_rounds[:2], axis=0) + np.sum(in_rounds[2:4], axis=0)) / 2
        np.testing.assert_allclose(in_rounds[4:], [of_replica] * 3)
        assert (of_replica > 0).sum() == 2, "the rounds of both fragments have tokens"
    pooled = [schedule.pop("penalty", None) for schedule in kept]
    assert all(schedule == kept[0] for schedule in kept), "the round continues where it was"
    if pooled[0] is not None:
        before, after = (penalty["norms"] for penalty in pooled[:2])
        means = np.array(before["mean"])
        assert (before["count"], after["count"]) == ([[1] * 3] * 2, [[1] * 3] * 3)
        np.testing.assert_allclose(after["mean"], [means.mean(0)] * 3, rtol=1e-13)
        np.testing.assert_allclose(after["variance"], [means.var(0)] * 3, rtol=1e-9)
        assert pooled[1]["steps"]["mean"] == [pooled[0]["steps"]["mean"][0]] * 3
    if kind == "streaming-weighed":
        assert any(name.startswith("sync.unsent.") for name in of_replicas(got)[0])
    if kind in SHARED:
        assert {name.split(".")[0] for name in shared(got)} == SHARED[kind]


def _pop_tokens(schedule: dict[str, Any]) -> list[float]:
    """Remove the tokens from a schedule's state, and return those of the rounds that continue. The tokens of a message
    that has been sent have no effect any longer."""
    for sent in schedule["sent"]:
        (sent or {}).pop("tokens", None)
    return [since.pop("tokens") for since in schedule["local_steps"]]


@pytest.mark.parametrize(
    "least",
    [
        pytest.param(0, id="at a synchronization", marks=pytest.mark.deep),
        pytest.param(1000, id="in a round", marks=pytest.mark.deep),
    ],
)
def test_rounds_of_seconds_go_on_at_the_mean_step(ranks: RankPool, folder: Path, least: int) -> None:
    """Two replicas, one three times as slow, and then three others read no sample twice and leave none out."""
    name = f"timed-{least}"
    keys = ("sync.warmup_steps=2", f"sync.period.min_steps={least}", "train.steps=40")
    recipe = recipe_of(folder, name, *TIMED, *keys)
    [begun] = run(ranks, Part(recipe, 2, 1, 8, seconds=(0.5, 1.5)))
    old = read_checkpoint(newest(checkpoints(folder, name)))
    steps = old.ranks("step")
    assert steps[0] > steps[1] and old.state["step"] == sum(steps) // 2
    ranks.run(rewrite, [(Part(recipe, 3, 1, 99), folder / f"rewritten-{name}")], world_size=3, timeout=600)
    got = read_checkpoint(newest(folder / f"rewritten-{name}"))
    assert_follows_the_rules(got, old, rtol=1e-13)
    period, was = got.ranks("method", "period")[0], old.ranks("method", "period")[0]
    assert got.ranks("step") == [old.state["step"]] * 3
    assert (period["last_exchange_step"], period["summed_steps"]) == (old.state["step"], 3 * old.state["step"])
    since = was["summed_steps"] - was["summed_steps_at_sync"]
    assert period["summed_steps"] - period["summed_steps_at_sync"] == since
    assert (since > 0) == (least > 0)
    rounds = [state["round"]["steps"] for state in old.ranks("method", "schedule")]
    assert got.ranks("method", "schedule")[0]["round"]["steps"] == sum(rounds) / 2
    [went_on] = run(ranks, Part(recipe, 3, 1, 16, seconds=(0.5, 1.0, 1.5)))
    seen = Counter(chain.from_iterable(rank.samples for rank in [*begun, *went_on]))
    assert set(seen.values()) == {1}
    states = read_checkpoint(newest(checkpoints(folder, name))).ranks("loader")
    lowest = min(min(state["position"], *(start for start, _ in state.get("left", [[1e9, 0]]))) for state in states)
    samples = (52_049 - 1) // 32
    order = np.random.default_rng([recipe.run.seed, 0]).permutation(np.arange(samples, dtype=np.uint32))
    assert set(order[:lowest].tolist()) <= seen.keys()


@pytest.mark.parametrize(
    "meshes",
    [((2, 1), (1, 3), (3, 1)), pytest.param(((2, 2), (1, 4), (4, 1), (3, 1)), marks=pytest.mark.deep)],
    ids=["of few ranks", "of many"],
)
def test_meshes_in_turn_read_every_sample_once_and_keep_the_validation_loss(
    ranks: RankPool, folder: Path, meshes: tuple[tuple[int, int], ...]
) -> None:
    """The mesh changes within rounds and with an armed synchronization. The text is real."""
    recipe = recipe_of(
        folder, f"chain-{meshes[0][1]}", *EDIT, "sync.warmup_steps=2", "train.sequence_length=256", "train.steps=18"
    )
    ends = (*range(5, 5 * len(meshes), 5), 18)
    parts = [Part(recipe, *mesh, until) for mesh, until in zip(meshes, ends, strict=True)]
    seen, validation = [], []
    for part in parts:
        [of_ranks] = run(ranks, part)
        seen += chain.from_iterable(rank.samples for rank in of_ranks)
        validation.append(of_ranks[0].validation)
    samples = (52_049 - 1) // 256
    assert len(seen) == 18 * 12 > samples
    assert Counter(seen).keys() == set(range(samples)) and set(Counter(seen).values()) == {1, 2}
    assert sum(count == 2 for count in Counter(seen).values()) == 18 * 12 - samples, "the second epoch has the rest"
    for (_, before), (after, _) in pairwise(validation):
        assert after == pytest.approx(before, rel=1e-9), "training continues from the mean that was validated"
    starts = [before for before, _ in validation]
    assert starts == sorted(starts, reverse=True) and validation[-1][1] < validation[0][0] - 0.3


def test_replicas_that_join_bring_their_part_of_the_batch(ranks: RankPool, folder: Path) -> None:
    """With averaged gradients, two replicas train as one does with their whole batch. The runs are in float64."""
    small, large = (
        ("sync.method=local_sgd", "sync.warmup_steps=8", "train.steps=9", *batch)
        for batch in ((), ("train.global_batch=24",))
    )
    recipes = {name: [recipe_of(folder, name, *keys) for keys in (small, large)] for name in ("one", "two")}
    run(ranks, *(Part(recipe, 1, 1, 4) for recipe, _ in recipes.values()))
    [one] = run(ranks, Part(recipes["one"][1], 1, 1, 8))
    [two] = run(ranks, Part(recipes["two"][1], 2, 1, 8))
    assert said(two) == (
        "step-00000004, with 24 sequences per step instead of 12, written by 1 replica x 1 shard: 2 replicas start from it"
    )
    assert sorted(one[0].samples) == sorted(chain.from_iterable(rank.samples for rank in two))
    assert len(set(one[0].samples)) == 4 * 24
    of_two = lines(recipes["two"][1])
    assert [line["tokens"] // 32 for line in of_two] == [0, 12, 4 * 12, 4 * 12 + 4 * 24]
    for ours, theirs in zip(of_two, lines(recipes["one"][1]), strict=True):
        numbers = {tag: value for tag, value in theirs.items() if tag.startswith(("train/", "eval/"))}
        assert {tag: ours[tag] for tag in numbers} == pytest.approx(numbers, rel=1e-10, abs=1e-13)


def test_damage_that_one_rank_finds_is_an_error_of_all(ranks: RankPool, folder: Path) -> None:
    recipe = recipe_of(folder, "damaged", "sync.method=local_sgd", "sync.warmup_steps=2")
    run(ranks, Part(recipe, 2, 1, 3))
    path = newest(checkpoints(folder, "damaged"))
    for file in path.glob("__1_*.distcp"):  # written, and read again, by rank 1 alone
        file.write_bytes(b"")
    first, second = ranks.run(refusal, Part(recipe, 2, 1, 99), world_size=2, timeout=600)
    assert first == second and first.startswith(f"{path} can't be read: ") and "\n" not in first
