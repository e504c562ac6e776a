"""Tests of a text per replica: replicas of a site share its text equally, and cursors belong to sites, on any mesh."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenShards
from llmtrain.data.loader import Loader
from llmtrain.data.sites import SiteLoader, tokenizer_digest
from llmtrain.errors import DataError
from llmtrain.reshard import MeshChange

LENGTH, BATCH = 4, 24
TEXTS = {name: TokenShards([10_000 * number + np.arange(480 * LENGTH + 1)]) for number, name in enumerate("ABC")}
"""Tokens of each site. They have 480 samples per site, so that no epoch ends in these tests."""
SHAPE = BatchShape(LENGTH, BATCH, micro_batch=1, seed=7)


def loaders(sites: str, shards: int = 1, batch: int = BATCH) -> list[list[SiteLoader]]:
    """Return the loaders of each replica. `sites` has one letter per replica, the name of its site."""
    run = replace(SHAPE, replicas=len(sites), shards=shards, global_batch=batch)
    return [
        [SiteLoader(TEXTS[site], [*sites], replace(run, replica=replica, shard_rank=shard)) for shard in range(shards)]
        for replica, site in enumerate(sites)
    ]


def read(replicas: list[list[SiteLoader]], steps: Sequence[int]) -> list[tuple[str, int]]:
    """Return what replicas read, each in its number of `steps`, as (site, sample)."""
    found = []
    for ranks, count in zip(replicas, steps, strict=True):
        for _ in range(count):
            for row in (row for rank in ranks for batch in rank.next() for row in batch):
                found.append(("ABC"[int(row[0]) // 10_000], int(row[0]) % 10_000 // LENGTH))
    return found


def continued(
    replicas: list[list[SiteLoader]], sites: str, shards: int = 1, batches: tuple[int, int] = (BATCH, BATCH)
) -> list[list[SiteLoader]]:
    """Return the loaders of a run at `sites` that continues `replicas` through a checkpoint. `batches` are the old and the
    new global batch."""
    values = [{"loader": json.loads(json.dumps(rank.state_dict()))} for ranks in replicas for rank in ranks]
    there, old_batch = loaders(sites, shards, batches[1]), None if batches[0] == batches[1] else batches[0]
    for replica, ranks in enumerate(there):
        for shard, rank in enumerate(ranks):
            change = MeshChange(len(replicas), len(replicas[0]), len(sites), shards, replica, shard, 0, old_batch)
            rank.load_state_dict(change.apply({"loader": rank.reshard_rule()}, values)["loader"])
    return there


def test_a_site_alone_is_a_run_on_its_text() -> None:
    plain = Loader(TEXTS["A"], SHAPE)
    rows = [int(row[0]) // LENGTH for _ in range(5) for batch in plain.next() for row in batch]
    assert read(loaders("A"), [5]) == [("A", row) for row in rows]


@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_of_a_site_share_its_text_in_equal_parts(shards: int) -> None:
    found = read(loaders("ABA", shards), [20, 20, 20])
    assert Counter(site for site, _ in found) == {"A": 320, "B": 160}
    assert max(Counter(found).values()) == 1, "no sample twice"
    alone = {site: [sample for one, sample in read(loaders(site), [20]) if one == site] for site in "AB"}
    assert {sample for site, sample in found if site == "A"} == set(alone["A"][:320])
    assert [sample for site, sample in found if site == "B"] == alone["B"][:160], "samples are in the order of the site"


def test_the_same_mesh_goes_on_exactly_also_if_replicas_are_not_at_one_step() -> None:
    first, straight = loaders("ABA", 2), loaders("ABA", 2)
    read(first, [4, 9, 6])
    read(straight, [4, 9, 6])
    assert read(continued(first, "ABA", 2), [3, 3, 3]) == read(straight, [3, 3, 3])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_site_goes_on_where_it_stopped_after_an_absence(shards: int) -> None:
    replicas = loaders("ABC")
    found = read(replicas, [5, 5, 5])
    replicas = continued(replicas, "AB", shards)
    assert [rank.state_dict()["absent"]["C"] for ranks in replicas for rank in ranks] == [
        {"position": 40, "sizes": [480]}
    ] * 2 * shards
    found += read(replicas, [4, 4])
    replicas = continued(replicas, "AB", shards)  # the same mesh keeps the cursor of C
    replicas = continued(replicas, "ABC")
    assert not any(rank.absent for ranks in replicas for rank in ranks)
    found += read(replicas, [5, 5, 5])
    read_at = Counter(site for site, _ in found)
    assert read_at == {"A": 8 * 10 + 12 * 4, "B": 8 * 10 + 12 * 4, "C": 80} and max(Counter(found).values()) == 1
    expected = read(loaders("C"), [20])[:80]
    assert [pair for pair in found if pair[0] == "C"] == expected


def test_an_absent_site_whose_text_grows_keeps_the_order_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TEXTS["B"]
    monkeypatch.setitem(TEXTS, "B", TokenShards([10_000 + np.arange(240 * LENGTH + 1)]))
    replicas = loaders("AB")
    found = read(replicas, [5, 5])
    replicas = continued(replicas, "A")
    monkeypatch.setitem(TEXTS, "B", whole)
    found += read(continued(replicas, "AB"), [10, 10])
    of_b = [sample for site, sample in found if site == "B"]
    assert len(of_b) == 12 * 15 and max(Counter(of_b).values()) == 1 and max(of_b) < 240


@pytest.mark.parametrize("sites", ["BA", "AC", "CB", "BB"])
def test_sites_belong_to_their_names_wherever_they_are_in_the_list(sites: str) -> None:
    replicas = loaders("AB")
    before = read(replicas, [3, 3])
    found = before + read(continued(replicas, sites), [2, 2])
    assert max(Counter(found).values()) == 1
    for site in "ABC":
        samples = [sample for name, sample in found if name == site]
        expected = [sample for _, sample in read(loaders(site), [10])]
        assert Counter(samples) == Counter(expected[: len(samples)])


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_comes_once_over_many_changes(seed: int) -> None:
    drawn, replicas, seen, batch, sites = random.Random(seed), loaders("AAB"), Counter(), BATCH, "AAB"
    for _ in range(4):
        seen.update(read(replicas, [drawn.randrange(4) for _ in replicas]))
        states = [ranks[0].state_dict() for ranks in replicas]
        counted = replicas[0][0].read_by_text(states)
        assert {site: number for site, number in counted.items() if number} == Counter(site for site, _ in seen)
        sites = drawn.choice([sites, "".join(drawn.choices("ABC", k=drawn.choice([1, 2, 3, 4])))])
        batches = batch, drawn.choice([BATCH, 2 * BATCH])
        replicas = continued(replicas, sites, drawn.choice([1, 2]), batches)
        batch = batches[1]
    assert set(seen.values()) <= {1}


def test_a_text_smaller_than_a_step_of_its_site_is_refused_by_its_name() -> None:
    small = TokenShards([np.arange(13)])
    with pytest.raises(DataError, match=r"A: training data: 13 tokens, but .* needs 49; .* \(data.per_replica, "):
        SiteLoader(small, ["A", "B"], replace(SHAPE, replicas=2))


def test_a_longer_run_asks_for_its_site_s_samples() -> None:
    (one,), _ = loaders("AB")
    asked = []
    state = one.state_for_length(
        {"position": 0}, lambda name, samples, of_text: asked.append((name, of_text(5))) or samples - 80
    )
    assert asked == [("A", 5)] and state == {"position": 0, "sizes": [400, 480]}


def test_tokenizers_are_the_same_if_they_separate_documents_alike(tmp_path: Path) -> None:
    """The tokenizer of a base model differs from that of its chat version, which has the same tokenizer.json but another
    eos token."""
    (tmp_path / "tokenizer").mkdir()

    def digest(eos: int = 5, size: int = 8, indent: int | None = None) -> str:
        (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps({"model": {"a": 0}}, indent=indent))
        return tokenizer_digest(SimpleNamespace(directory=tmp_path, eos_id=eos, vocab_size=size))

    assert digest() == digest(indent=2)
    assert len({digest(), digest(eos=6), digest(size=9)}) == 3
