"""Tests of runs whose replicas have their own texts, and of mixtures: validation by text, and resuming."""

from __future__ import annotations

import json
import math
import sysconfig
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from llmtrain.config import DataSection, Recipe
from llmtrain.data.dataset import TOKENIZER
from llmtrain.data.prepare import prepare
from llmtrain.errors import DataError
from llmtrain.loss import IGNORE_INDEX
from llmtrain.parallel.mesh import build_mesh
from llmtrain.parallel.world import World
from llmtrain.train import text_kinds
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run import _prepare_own
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.run_texts import RunTexts
from llmtrain.train.validation import validate
from tests.distributed.pool import RankPool
from tests.distributed.reshard_runs import recipe_of
from tests.distributed.stored_runs import KEYS, STEPS, STOPPED_AFTER, train
from tests.end_to_end.runs import exact, lines_of

TEXTS = {"a": ("this", "bisect", "heapq", "textwrap"), "b": ("queue", "shlex", "sched", "stat")}
ENTRIES = "data.{key}=[{{source: {folder}/a, weight: 3}}, {{source: {folder}/b}}]"
FAST = ("edit", "a_edit")
"""A method with rounds of steps, and one with timed rounds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with the texts of two sites, of which b has less for validation, and a tokenizer."""
    folder = tmp_path_factory.mktemp("sites")
    for site, modules in TEXTS.items():
        (folder / site).mkdir()
        for module in modules:
            source = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text()
            (folder / site / f"{module}.txt").write_text(source.replace("\n\n", "\n<|endoftext|>\n"))
    data = {"validation_fraction": 0.1, "cache_dir": str(folder / "data")}
    prepared = prepare(DataSection(source=str(folder / "a"), tokenizer="train:400", **data), 1, 1)
    prepared.directory.joinpath(TOKENIZER).rename(folder / "tokenizer")
    return folder


def recipe(folder: Path, name: str, key: str, *overrides: str) -> Recipe:
    entries = ENTRIES.format(key=key, folder=folder)
    if key == "per_replica":
        entries = entries.replace(", weight: 3", "")
    texts = ["data.source=null", "data.validation=null", "data.validation_fraction=0.1", entries]
    return recipe_of(folder, name, *texts, f"data.tokenizer={folder}/tokenizer", *STEPS, "eval.tokens=3000", *overrides)


def of_steps(lines: list[dict]) -> list[dict]:
    return [exact(line) | {tag: value for tag, value in line.items() if tag.startswith("eval/")} for line in lines]


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=() if method in FAST else pytest.mark.deep) for method in KEYS]
)
def test_two_sites_train_are_validated_and_resume_by_every_method(ranks: RankPool, folder: Path, method: str) -> None:
    one = recipe(folder, f"two-sites-{method}", "per_replica", f"sync.method={method}", *KEYS[method])
    for stop_after, ending in ((STOPPED_AFTER, "signal"), (None, "done")):
        assert ranks.run(train, one, (2, 1), stop_after, world_size=2) == [ending] * 2
    validations = [line for line in lines_of(RunDirectory(one).path) if "eval/loss" in line]
    assert validations[0]["step"] == 0 and validations[-1]["step"] >= 13
    for line in validations:
        assert (
            min(line["eval/a/loss"], line["eval/b/loss"])
            < line["eval/loss"]
            < max(line["eval/a/loss"], line["eval/b/loss"])
        )
        assert line["eval/a/bpb"] > 0 and line["eval/b/ppl"] == pytest.approx(math.exp(line["eval/b/loss"]))
    assert validations[-1]["eval/a/loss"] < validations[0]["eval/a/loss"] - 0.1
    assert validations[-1]["eval/b/loss"] < validations[0]["eval/b/loss"] - 0.1


@pytest.mark.parametrize("key", [pytest.param("sources", marks=pytest.mark.deep), "per_replica"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(ranks: RankPool, folder: Path, key: str) -> None:
    runs = [recipe(folder, f"{name}-{key}", key, "sync.method=edit", *KEYS["edit"]) for name in ("once", "twice")]
    for one, stops in zip(runs, ([None], [STOPPED_AFTER, None]), strict=True):
        for stop_after in stops:
            ranks.run(train, one, (2, 1), stop_after, world_size=2)
    once, twice = (of_steps(lines_of(RunDirectory(one).path)) for one in runs)
    assert once[-1] == twice[-1] and "eval/b/loss" in once[-1]
    assert [line for line in twice if line["step"] in {12, 13}] == [line for line in once if line["step"] in {12, 13}]
    state = json.loads((RunDirectory(runs[1]).checkpoints / "step-00000013" / "state.json").read_text())
    sites = [rank["loader"].get("site") for rank in state["ranks"]]
    assert sites == (["a", "b"] if key == "per_replica" else [None] * 2)


def test_a_mixture_is_validated_by_weight(ranks: RankPool, folder: Path) -> None:
    one = recipe(
        folder, "weighted", "sources", "sync.method=edit", *KEYS["edit"], "train.steps=2", "sync.warmup_steps=1"
    )
    ranks.run(train, one, (2, 1), None, world_size=2)
    for line in (line for line in lines_of(RunDirectory(one).path) if "eval/loss" in line):
        assert line["eval/loss"] == pytest.approx(0.75 * line["eval/a/loss"] + 0.25 * line["eval/b/loss"])
        assert line["eval/bpb"] == pytest.approx(0.75 * line["eval/a/bpb"] + 0.25 * line["eval/b/bpb"])


class Counting:
    """Stand-in for an engine. The loss of a token is its id, and forward passes are counted."""

    def __init__(self) -> None:
        self.passes = 0

    def eval_mode(self):
        return self

    def __enter__(self):
        return self._loss

    def __exit__(self, *error: object) -> None:
        pass

    def _loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return labels[labels != IGNORE_INDEX].double().sum()


def open_texts(recipe: Recipe, replicas: int, shards: int) -> tuple[RunTexts, int]:
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    mesh = build_mesh(
        world,
        torch.device("cpu"),
        replicas=replicas,
        shards=shards,
        replica_backend="auto",
        timeout=timedelta(seconds=60),
    )
    own = prepare_texts(recipe, show_progress=False, replicas=[mesh.replica_comms.rank])
    return text_kinds.open_texts(recipe, mesh, own, {}), mesh.replica_comms.rank


def validated(recipe: Recipe, replicas: int, shards: int) -> tuple[list, int, list[str], dict]:
    """Validate, read one step, and return this rank's (parts with their losses, forward passes of the validation, names
    of its texts, summaries of what it has read)."""
    texts, _ = open_texts(recipe, replicas, shards)
    (own,), engine = texts.validation_sets(), Counting()
    found = validate(engine, texts.mesh, [part.batches for part in own.parts])
    loader = texts.loader()
    loader.next()
    summaries = texts.summaries(loader, loader.state_dict(), {"a": 4.0})
    parts = [(part.name, part.share, one.loss, one.tokens) for part, one in zip(own.parts, found, strict=True)]
    return (
        parts,
        engine.passes,
        list(texts.texts),
        summaries | {"scan": len(texts.scan()._shards), "lines": texts.describe(loader)},
    )


def expected_of(recipe: Recipe, site: str) -> tuple[float, int]:
    """Return (mean token id, number of tokens) of a site's validation text."""
    prepared = prepare_texts(recipe, show_progress=False)[site].tokens("validation")
    length = recipe.train.sequence_length
    windows = min(recipe.eval.tokens // length, (len(prepared) - 1) // length)
    tokens = prepared.window(1, windows * length)
    return float(tokens.astype(float).mean()), len(tokens)


@pytest.mark.parametrize(
    ("entries", "shards", "shares"),
    [("ab", 2, (1, 1)), ("aab", 1, (1, 1, 1)), ("aab", 1, (1, 2, 1)), ("abab", 1, (1, 1, 1, 1))],
)
def test_every_site_is_validated_by_its_own_ranks(
    ranks: RankPool, folder: Path, entries: str, shards: int, shares: tuple[int, ...]
) -> None:
    listed = ", ".join(f"{{source: {folder}/{site}}}" for site in entries)
    keys = [f"data.per_replica=[{listed}]", "eval.tokens=2000", "train.global_batch=24", "train.micro_batch=1"]
    one = recipe(folder, "read", "per_replica", *keys, f"train.batch_shares={[*shares]}")
    size = len(entries) * shards
    found = ranks.run(validated, one, len(entries), shards, world_size=size)
    parts, passes, _, summaries = found[0]
    assert all(one[0] == parts for one in found), "every rank has all parts"
    assert {one[1] for one in found} == {passes}, "equally many forward passes on every rank"
    assert [one[2] for one in found] == [[site] for site in entries for _ in range(shards)], "only its own text"
    for name, share, loss, tokens in parts:
        assert (loss, tokens) == (
            pytest.approx(expected_of(one, name)[0]),
            expected_of(one, name)[1],
        ) and share == tokens
    for site in "ab":
        own = sum(share for share, at in zip(shares, entries, strict=True) if at == site)
        assert summaries[site]["sequences"] == 24 * own // sum(shares)
    assert summaries["a"]["eval_loss"] == 4.0 and summaries["b"]["eval_loss"] is None
    assert summaries["lines"][0].startswith(f"sites: a {100 * summaries['a']['sequences'] / 24:.3g}% (")
    scans = [sum(one[3]["scan"] for one in found if one[2] == [site]) for site in "ab"]
    assert scans == [2, 2], "each token shard of each site is scanned once on this node"


def opened(recipe: Recipe, spoil: str) -> str:
    """Open the texts and return this rank's error. `spoil` is wrong on rank 1: `tokenizer`, `text` or nothing."""
    with mock.patch(
        "llmtrain.train.text_kinds.tokenizer_digest",
        lambda text: f"digest{dist.get_rank() if spoil == 'tokenizer' else ''}",
    ):
        if spoil == "text" and dist.get_rank() == 1:
            changed = recipe.train.model_copy(update={"sequence_length": 10**6})
            recipe = recipe.model_copy(update={"train": changed})
        try:
            open_texts(recipe, 2, 1)
        except DataError as error:
            return str(error)
    return ""


def test_what_one_site_lacks_is_an_error_at_all(ranks: RankPool, folder: Path) -> None:
    one = recipe(folder, "spoiled", "per_replica")
    assert ranks.run(opened, one, "", world_size=2) == ["", ""]
    first, second = ranks.run(opened, one, "tokenizer", world_size=2)
    assert (
        first
        == second
        == (
            "data.tokenizer: rank 1 at b has a different tokenizer (digest1) than rank 0 at a (digest0); give all sites the same files, "
            "and prepare again"
        )
    )
    first, second = ranks.run(opened, one, "text", world_size=2)
    assert first == second and first.startswith("b: training data: ") and "(rank 1 on " in first


@pytest.mark.parametrize(("rank", "is_shared"), [(2, False), (3, True)])
def test_the_fault_of_a_sites_text_is_told_by_its_first_rank(tmp_path: Path, rank: int, is_shared: bool) -> None:
    """The first rank of the host belongs to another site, and does not know of the fault."""
    (tmp_path / "there.txt").write_text("text")
    entries = f"data.per_replica=[{{source: {tmp_path}/there.txt}}, {{source: {tmp_path}/missing.txt}}]"
    texts = ("data.source=null", "data.validation=null", entries, f"data.tokenizer={tmp_path}/tokenizer.json")
    with pytest.raises(DataError, match=r"missing\.txt: no such file") as caught:
        _prepare_own(recipe_of(tmp_path, "run", *texts), World(rank, 4, rank, 4), 2)
    assert caught.value.is_shared == is_shared
