"""What mutants of prepared folders showed to be untested."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.data import tokenizer
from llmtrain.data.dataset import INDEX, Index, ShardWriter, SplitIndex, open_dataset
from llmtrain.data.sources import Position
from llmtrain.data.tokenizing import BatchTokenizer
from llmtrain.errors import DataError
from llmtrain.train.run_texts import RunTexts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A prepared folder of five tokens, that stand for twenty bytes, in either split."""
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


def test_no_batch_is_kept_that_comes_after_one_that_failed() -> None:
    class Tokenizer(BatchTokenizer):
        """Its second batch fails when the third one is done."""

        killed: Future

        def _submit(self, batch: str) -> Future:
            found: Future = Future()
            if batch == "second":
                self.killed = found
            else:
                found.set_result(batch)
            if batch == "third":
                self.killed.set_exception(BrokenProcessPool())
            return found

    found: list[tuple[str, int]] = []
    with pytest.raises(DataError, match="a process that tokenizes was killed"):
        found.extend(Tokenizer(None, 0, 2).in_order([("first", 1), ("second", 2), ("third", 3)]))
    assert found == [("first", 1)]


@pytest.mark.parametrize("length", [3, 4])
def test_a_complete_text_that_is_shuffled_in_blocks_has_as_many_samples_as_it_has(length: int) -> None:
    class Tokens(list):
        is_complete = True

    texts = SimpleNamespace(sites=None, train_text=SimpleNamespace(tokens=Tokens(range(13))))
    loader = SimpleNamespace(sequence_length=length, num_samples=2**61)
    assert RunTexts.samples(texts, loader) == {"": 12 // length}
    texts.train_text.tokens = Tokens(range(length))
    assert RunTexts.samples(texts, loader) is None, "the loader refuses it"
    Tokens.is_complete, texts.train_text.tokens = False, Tokens(range(13))
    assert RunTexts.samples(texts, loader) is None


@pytest.mark.parametrize("error", [RuntimeError("no such class"), ImportError("needs sentencepiece")])
def test_a_tokenizer_of_the_hub_that_can_not_be_loaded_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str, **options: bool) -> None:
        raise error

    monkeypatch.setattr(tokenizer, "require", lambda *_, **__: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(DataError, match=rf"^data.tokenizer: some/name: can't be loaded \(.*{error}\)$"):
        tokenizer._load_hub("some/name")
