"""Tests of the disk space that the doctor requires for tokens of hub datasets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.config import DataSection
from llmtrain.data.dataset import FORMAT, INDEX, TOKENIZER, Index, SplitIndex
from llmtrain.data.prepare import cache_path
from llmtrain.data.sources import Position
from llmtrain.doctor import machine
from llmtrain.doctor.run_checks import fit
from llmtrain.doctor.token_space import missing_token_bytes
from llmtrain.recipe_loader import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GPT2 = 50257
VALIDATION = 1_000_002
"""Validation tokens that the recipe prepares: those that it reads, the last label, and one more."""
READ = 23_841 * 1024 * 4096 + 2
"""Training tokens that the *_1b recipes prepare, counted in the same way."""
ONE_HOST = ["a"] * 8


def one_billion(folder: Path, *overrides: str):
    folders = [f"run.out_dir={folder}", f"data.cache_dir={folder}"]
    return load_recipe(RECIPES / "synchronous_1b.yaml", [*folders, *overrides])


def test_a_hub_dataset_takes_the_tokens_of_the_run(tmp_path: Path) -> None:
    recipe = one_billion(tmp_path)
    assert missing_token_bytes(recipe, GPT2, ONE_HOST, 8) == 2 * (READ + VALIDATION)
    assert missing_token_bytes(recipe, 65_536, ONE_HOST, 8) == 2 * (READ + VALIDATION)
    assert missing_token_bytes(recipe, 65_537, ONE_HOST, 8) == 4 * (READ + VALIDATION)
    limited = one_billion(tmp_path, "data.max_tokens=1000")
    assert missing_token_bytes(limited, GPT2, ONE_HOST, 8) == 2 * (1000 + VALIDATION)


def test_files_are_not_counted(tmp_path: Path) -> None:
    assert missing_token_bytes(one_billion(tmp_path, "data.source=stdlib"), GPT2, ONE_HOST, 8) is None
    mixed = "data.sources=[{source: stdlib}, {source: 'hf:some/text', weight: 3}]"
    of_three_quarters = 750 * -(-23_841 * 1024 // 1000) * 4096 + 2
    assert missing_token_bytes(one_billion(tmp_path, mixed), GPT2, ONE_HOST, 8) == 2 * (of_three_quarters + VALIDATION)


def test_of_a_text_per_replica_the_node_with_most_counts(tmp_path: Path) -> None:
    sites = "data.per_replica=[{source: stdlib}, {source: 'hf:some/one'}, {source: 'hf:some/two'}, {source: 'hf:some/three'}]"
    recipe = one_billion(tmp_path, sites)
    for nodes, shards, texts in (
        (["a", "b", "c"], 1, 1),
        (["a", "b", "b"], 1, 2),
        (["a", "a", "a"], 1, 2),
        (["a", "a", "b", "b"], 1, 2),
        (["a", "a", "b", "b", "c", "c"], 2, 1),
    ):
        assert missing_token_bytes(recipe, GPT2, nodes, shards) == texts * 2 * (READ + VALIDATION)
    assert missing_token_bytes(recipe, GPT2, ["a"], 1) is None, "the first replica's text is on the disk"
    together = one_billion(tmp_path, sites, "parallel.in_process=true", "parallel.replicas=3", "parallel.shards=1")
    assert missing_token_bytes(together, GPT2, ["a"], 1) == 2 * 2 * (READ + VALIDATION)


def prepare_tokens(data: DataSection, train: int, is_all: bool) -> None:
    """Write the index of a folder that has so many training tokens and no others."""
    splits = {
        split: SplitIndex(
            tokens=tokens, documents=1, text_bytes=1, exhausted=is_all, position=Position(documents=1), shards=()
        )
        for split, tokens in (("train", train), ("validation", 0))
    }
    index = Index(
        format=FORMAT,
        source=data.source,
        tokenizer="gpt2",
        vocab_size=GPT2,
        eos_id=0,
        dtype="<u2",
        splits=splits,
    )
    folder = cache_path(data)
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_text(index.model_dump_json())


def test_tokens_that_are_prepared_are_not_counted_again(tmp_path: Path) -> None:
    recipe = one_billion(tmp_path)
    prepare_tokens(recipe.data, 10**9, is_all=False)
    assert missing_token_bytes(recipe, GPT2, ONE_HOST, 8) == 2 * (READ - 10**9 + VALIDATION)
    prepare_tokens(recipe.data, 2 * READ, is_all=False)
    assert missing_token_bytes(recipe, GPT2, ONE_HOST, 8) == 2 * VALIDATION
    prepare_tokens(recipe.data, 10**9, is_all=True)
    assert missing_token_bytes(recipe, GPT2, ONE_HOST, 8) == 0, "the dataset has no more"


def test_later_texts_of_a_mixture_have_the_tokenizer_of_the_first(tmp_path: Path) -> None:
    mixed = "data.sources=[{source: stdlib}, {source: 'hf:some/text'}]"
    recipe = one_billion(tmp_path, mixed, "data.tokenizer=train:300")
    first, second = recipe.data.texts().values()
    prepare_tokens(first, 1000, is_all=True)
    prepare_tokens(second.model_copy(update={"tokenizer": str(cache_path(first) / TOKENIZER)}), 1000, is_all=True)
    assert missing_token_bytes(recipe, 300, ONE_HOST, 8) == 0


@pytest.mark.parametrize(("free", "level"), [(150, "warning"), (250, "ok")])
def test_a_disk_that_the_tokens_fill_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=free * 2**30))
    recipe = one_billion(tmp_path, "checkpoint.keep=1", "checkpoint.keep_every=null")
    found, _ = fit(recipe, ONE_HOST, [80.0 * 2**30] * 8)
    assert found[-1].level == level
    assert found[-1].what == (f"data.cache_dir={tmp_path}: {free:.1f} GiB free, the run adds tokens of up to 186.3 GiB")
    assert found[-1].advice == ("free some room or change data.cache_dir" if level == "warning" else "")
