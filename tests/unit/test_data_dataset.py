"""Tests of prepared folders: bytes per token, and shards that differ from the index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.dataset import INDEX, Index, ShardWriter, SplitIndex, open_dataset
from llmtrain.data.sources import Position
from llmtrain.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a prepared folder with five tokens, which stand for twenty bytes, in each split."""
    splits = {}
    for split in ("train", "validation"):
        writer = ShardWriter(tmp_path, split, np.dtype("<u2"))
        writer.append(np.arange(5))
        writer.close()
        splits[split] = SplitIndex(
            tokens=5, documents=1, text_bytes=20, exhausted=True, position=Position(), shards=tuple(writer.shards)
        )
    index = Index(format=2, source="s", tokenizer="t", vocab_size=9, eos_id=0, dtype="<u2", splits=splits)
    (tmp_path / INDEX).write_text(index.model_dump_json())
    return tmp_path


def test_a_token_stands_for_so_many_bytes(folder: Path) -> None:
    assert open_dataset(folder).bytes_per_token("validation") == 4


def test_a_shard_that_is_too_long_is_damaged(folder: Path) -> None:
    shard = folder / "train-00000.npy"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(DataError, match=f"{size + 1} bytes found, {size} expected"):
        open_dataset(folder)


def test_a_shard_that_can_not_be_read_is_told_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mmap_mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("llmtrain.data.dataset.np.load", refuse)
    with pytest.raises(DataError, match=r"train-00000.npy: can't be read \(.*Permission denied"):
        open_dataset(folder)


def test_a_shard_that_is_given_up_takes_no_room(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"))
    writer.append(np.arange(5))
    writer.discard()
    assert not list(tmp_path.iterdir())
