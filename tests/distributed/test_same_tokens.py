"""Tests of the check, before training, that all hosts have prepared the same tokens."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from llmtrain.config import DataSection
from llmtrain.data.prepare import prepare
from llmtrain.data.same_tokens import check_same_tokens, remedy_for
from llmtrain.data.token_digests import token_digest
from llmtrain.errors import DataError
from llmtrain.parallel.mesh import build_mesh
from llmtrain.parallel.world import World

TEXTS = [f"Document {i}, read {i * i} times." for i in range(400)]
KEYS = {"tokenizer": "train:320", "validation_fraction": 0.2}


def section(folder: Path, texts: list[str]) -> DataSection:
    folder.mkdir()
    (folder / "stories.txt").write_text("\n~~~\n".join(texts))
    return DataSection(source=str(folder / "stories.txt"), separator="\n~~~\n", cache_dir=str(folder / "cache"), **KEYS)


def checked(sections: list[DataSection]) -> str:
    """Prepare `sections[rank]`, and return the error that this rank gets, or an empty string."""
    world = World(dist.get_rank(), 2, dist.get_rank(), 2)
    mesh = build_mesh(
        world, torch.device("cpu"), replicas=2, shards=1, replica_backend="auto", timeout=timedelta(seconds=60)
    )
    try:
        check_same_tokens(mesh, {"": prepare(sections[world.rank], 3000, 300)})
    except DataError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_other_tokens_on_another_host_are_refused_on_all(ranks, tmp_path: Path) -> None:
    a, b, c = (section(tmp_path / name, texts) for name, texts in {"a": TEXTS, "b": TEXTS, "c": TEXTS[::-1]}.items())
    assert ranks.run(checked, [a, b], world_size=2) == ["", ""]
    one, other = ranks.run(checked, [a, c], world_size=2)
    assert (
        one.startswith(f"DataError: {a.source}: rank 1 on ")
        and "has different tokens (4,038 + 301 of a vocabulary of 320" in one
    )
    assert other.startswith(f"DataError: {c.source}: rank 1 on ")
    assert other.endswith("; copy this text, and data.tokenizer if it is a file or folder, from one host to all")


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (
            "hf:some/text",
            "let all hosts see one data.cache_dir, or delete cache/a on the others and copy it from one to all",
        ),
        ("stdlib", "install the same versions of Python and its packages on all hosts"),
        ("python", "install the same versions of Python and its packages on all hosts"),
        ("stories", "install the same version of llmtrain on all hosts"),
        ("./stories", "copy this text, and data.tokenizer if it is a file or folder, from one host to all"),
    ],
)
def test_the_remedy_is_one_for_the_source(source: str, remedy: str) -> None:
    assert remedy_for(source, Path("cache/a")) == remedy


def checked_with_a_bad_disk(section: DataSection) -> str:
    """Return the error that this rank gets if rank 1 can't read the tokens that it has prepared."""
    prepare(section, 3000, 300)
    bad = mock.Mock(side_effect=OSError(5, "Input/output error"))
    with mock.patch("llmtrain.data.dataset.open_shard", bad) if dist.get_rank() == 1 else nullcontext():
        return checked([section, section])


def test_a_disk_that_fails_on_one_host_is_an_error_on_all(ranks, tmp_path: Path) -> None:
    one, other = ranks.run(checked_with_a_bad_disk, section(tmp_path / "a", TEXTS), world_size=2)
    assert one == other and one.startswith("UnavailableError: rank 1 on ")
    assert "can't read its token shards: train-00000.npy: can't be read any more ([Errno 5] Input/output error)" in one


def test_what_another_run_has_prepared_beyond_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain.data.extend.BATCH_CHARACTERS", 1000)
    data = section(tmp_path / "a", TEXTS)
    few, many = (data.model_copy(update={"max_tokens": number}) for number in (2000, 3000))
    before = token_digest(prepare(few, 2000, 300))
    assert token_digest(prepare(many, 3000, 600)) != before
    assert token_digest(prepare(few, 2000, 300)) == before
