"""Preparing: what is written, once, found again, made larger, safe when killed; and what is refused when opened."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from llmtrain.config import DataSection
from llmtrain.data import index
from llmtrain.data import prepare as module
from llmtrain.data.index import ShardWriter, TokenShards
from llmtrain.data.prepare import TokenDataset, open_dataset, prepare, verify
from llmtrain.data.sources import documents
from llmtrain.errors import DataError
from tests.mother import session
from tests.unit import processes

TEXTS = [f"Document {i}.\n\n  It says <|endoftext|> {i * i} times.\té" for i in range(400)]


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    source = tmp_path / "stories.txt"
    source.write_text("\n~~~\n".join(TEXTS))
    keys = {"tokenizer": "train:320", "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    return DataSection(source=str(source), separator="\n~~~\n", **keys)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 40)


def texts_of(prepared: TokenDataset, split: str) -> list[str]:
    tokens = prepared.tokens(split)
    ids = tokens.window(0, len(tokens))
    *documents, rest = np.split(ids, np.flatnonzero(ids == prepared.eos_id) + 1)
    assert not len(rest)
    tokenizer = prepared.load_tokenizer()
    return [tokenizer.decode(document[:-1]) for document in documents]


def made(prepared: TokenDataset) -> int:
    """When it was prepared."""
    return (prepared.directory / "index.json").stat().st_mtime_ns


def cached(data: DataSection) -> list[str]:
    return sorted(path.name for path in Path(data.cache_dir).iterdir() if path.is_dir())


@pytest.mark.usefixtures("small_batches")
def test_text_survives_and_counts_are_true(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardWriter.__init__, "__defaults__", (700,))
    prepared = prepare(data, 10**9, 10**9)
    assert prepared.directory.name.startswith("stories-train_320-")
    assert prepared.dtype == np.uint16 and prepared.vocab_size == 320
    for split in ("train", "validation"):
        expected = list(documents(data, split))
        assert texts_of(prepared, split) == expected
        index = prepared.index.splits[split]
        assert index.documents == len(expected) and index.exhausted
        assert index.text_bytes == sum(len(text.encode()) for text in expected)
        assert index.tokens == len(prepared.tokens(split)) == sum(shard.tokens for shard in index.shards)
        assert all(shard.tokens == 700 for shard in index.shards[:-1]) and len(index.shards) > 2
    verify(prepared)


def test_large_vocabulary_takes_four_bytes(data: DataSection, tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, **{f"word{i}": i for i in range(1, 70_000)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "words.txt").write_text("word69999 word1 word65536")
    (tmp_path / "valid.txt").write_text("word2")
    keys = {"source": str(tmp_path / "words.txt"), "tokenizer": str(tmp_path / "tokenizer.json")}
    prepared = prepare(data.model_copy(update={**keys, "validation": str(tmp_path / "valid.txt")}), 100, 100)
    assert prepared.dtype == np.uint32 and prepared.vocab_size == 70_001
    assert prepared.tokens("train").window(0, 4).tolist() == [69_999, 1, 65_536, 70_000]
    verify(prepared)


def at_most(data: DataSection, tokens: int) -> DataSection:
    return data.model_copy(update={"max_tokens": tokens})


@pytest.mark.usefixtures("small_batches")
def test_cache_is_reused_made_larger_and_never_changes_what_a_run_reads(data: DataSection) -> None:
    small = prepare(at_most(data, 500 + 1), 500, 100)
    assert not small.index.splits["train"].exhausted
    assert (len(small.tokens("train")), len(small.tokens("validation"))) == (501, 101)
    first = made(small)
    assert made(prepare(at_most(data, 400 + 1), 400, 50)) == first

    large = prepare(at_most(data, 3000 + 1), 3000, 100)
    second = made(large)
    assert second != first and cached(data) == [large.directory.name]
    again = prepare(at_most(data, 500 + 1), 500, 100)
    assert made(again) == second
    np.testing.assert_array_equal(again.tokens("train").window(0, 501), small.tokens("train").window(0, 501))
    assert again.index.splits["validation"].tokens >= small.index.splits["validation"].tokens

    third = made(prepare(at_most(data, 10**9 + 1), 10**9, 10**9))
    assert third != second
    assert made(prepare(at_most(data, 10**10 + 1), 10**10, 10**10)) == third
    assert len(prepare(at_most(data, 600), 10**9, 100).tokens("train")) == 600
    assert len(prepare(data, 10, 100).tokens("train")) > 3000, "files are tokenized whole unless told otherwise"


def test_other_choices_go_to_other_folders(data: DataSection, tmp_path: Path) -> None:
    prepare(data, 100, 100)
    for change in ({"tokenizer": "train:330"}, {"validation_fraction": 0.3}, {"separator": "~~~"}):
        prepare(data.model_copy(update=change), 100, 100)
    assert len(cached(data)) == 4
    Path(data.source).write_text("\n~~~\n".join([*TEXTS, "one more"]))
    prepare(data, 100, 100)
    assert len(cached(data)) == 5


@pytest.mark.usefixtures("small_batches")
def test_interruption_leaves_nothing_half_done(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prepare(at_most(data, 500 + 1), 500, 100)
    killed = before.directory.with_name(f"{before.directory.name}.new-tmp")
    killed.mkdir()
    (killed / "train-00000.npy").write_bytes(b"half")
    tokenize, calls = module._tokenize, []

    def interrupted(*arguments: object) -> np.ndarray:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return tokenize(*arguments)

    monkeypatch.setattr(module, "_tokenize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(at_most(data, 3000 + 1), 3000, 100)
    assert cached(data) == [before.directory.name]
    verify(prepare(at_most(data, 500 + 1), 500, 100))
    monkeypatch.setattr(module, "_tokenize", tokenize)
    killed.mkdir()
    verify(prepare(at_most(data, 3000 + 1), 3000, 100))
    assert cached(data) == [before.directory.name]


def test_processes_that_start_together_prepare_once(data: DataSection) -> None:
    started = [session().fork(processes.prepare_and_say_when, data.model_dump_json(), capture=True) for _ in range(3)]
    times = {process.communicate(timeout=100)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert times == {f"{made(prepare(data, 500, 100))}\n"} and len(cached(data)) == 1


def test_waiting_says_for_what_and_ends(data: DataSection, capsys: pytest.CaptureFixture[str]) -> None:
    Path(data.cache_dir).mkdir()
    holder = session().fork(processes.hold_lock, f"{module.cache_path(data)}.lock", capture=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(DataError, match=r"another process has held this lock for 0\.2 s"):
        prepare(data, 100, 100, show_progress=True, lock_timeout=0.2)
    assert "waiting for another process that prepares" in capsys.readouterr().out
    holder.kill()
    holder.wait(60)
    prepare(data, 100, 100)


def test_damaged_folders_are_refused_with_file_and_sizes(data: DataSection) -> None:
    prepared = prepare(at_most(data, 500 + 1), 500, 100)
    shard = prepared.directory / "train-00000.npy"
    whole = shard.read_bytes()

    def refused(message: str) -> None:
        for attempt in (lambda: open_dataset(prepared.directory), lambda: prepare(at_most(data, 500 + 1), 500, 100)):
            with pytest.raises(DataError, match=message) as caught:
                attempt()
            assert f"delete {prepared.directory} and prepare again" in str(caught.value)
            assert "\n" not in str(caught.value)

    shard.write_bytes(whole[:-10])
    refused(rf"train-00000\.npy: {len(whole) - 10} bytes found, {len(whole)} expected")
    np.save(shard, np.zeros((len(whole) - 128) // 2, dtype=">u2"))
    refused(r"train-00000\.npy: another file's content \(>u2 .* found, <u2 .* expected\)")
    shard.write_bytes(bytes(len(whole)))
    refused(r"train-00000\.npy: another file's content")
    shard.unlink()
    refused(rf"train-00000\.npy: no such file; expected {len(whole)} bytes")

    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train-00000\.npy on .*: checksum .* found, .* expected"):
        verify(open_dataset(prepared.directory))
    index = prepared.directory / "index.json"
    index.write_text(index.read_text().replace('"format": 1', '"format": 2'))
    refused(r"index\.json: format: Input should be 1")
    index.write_text("{")
    refused(r"index\.json: the file: Invalid JSON")
    index.unlink()
    refused(r"index\.json: no such file")


def test_a_split_without_documents_is_refused(data: DataSection, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no validation documents; .*data\.validation"):
        prepare(data.model_copy(update={"separator": None, "validation_fraction": 1e-9}), 10, 10)
    assert cached(data) == []


def test_a_cache_that_can_t_be_written_is_named(data: DataSection) -> None:
    with pytest.raises(DataError, match=r"data\.cache_dir: .*stories\.txt: .*; expected a folder to write in"):
        prepare(data.model_copy(update={"cache_dir": data.source}), 100, 100)


def test_a_disk_that_fails_is_not_taken_for_a_full_one(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its traceback: there is nothing to change in the recipe."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "_write", fail)
    with pytest.raises(OSError, match="Input/output error") as failed:
        prepare(data, 100, 100)
    assert not isinstance(failed.value, DataError) and cached(data) == []


def test_a_tokenizer_in_python_alone_gives_the_text_back(data: DataSection, tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    texts = ["It says </s> twice </s>.", "très bien", "the end"]
    Path(data.source).write_text("~~~".join(texts))
    whole = {"tokenizer": str(tmp_path / "byt5"), "separator": "~~~", "validation": data.source}
    prepared = prepare(data.model_copy(update=whole), 100, 100)
    assert prepared.tokens("train").window(0, 4).tolist() == [byte + 3 for byte in b"It s"]
    assert texts_of(prepared, "train") == texts
    assert prepared.index.splits["train"].tokens == sum(len(text.encode()) + 1 for text in texts)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_shards_are_plain_npy_read_as_one_sequence(tmp_path: Path, dtype: str) -> None:
    everything = np.random.default_rng(0).integers(0, 60_000, 1003).astype(dtype)
    writer = ShardWriter(tmp_path, "train", np.dtype(dtype), shard_tokens=100)
    for part in np.array_split(everything, 7):
        writer.append(part.astype(np.uint32))
    writer.close()
    assert [shard.tokens for shard in writer.shards] == [100] * 10 + [3]
    arrays = [np.load(tmp_path / shard.name, mmap_mode="r") for shard in writer.shards]
    np.testing.assert_array_equal(np.concatenate(arrays), everything)
    tokens = TokenShards(arrays)
    for start, length in [(0, 1003), (0, 100), (99, 2), (100, 100), (150, 500), (1000, 3), (250, 1)]:
        window = tokens.window(start, length)
        assert window.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(window, everything[start : start + length])
    assert all(np.shares_memory(tokens.window(start, 100), arrays[start // 100]) for start in (0, 100, 900)), "no copy"
    assert len(TokenShards(arrays, 150)) == 150 and len(TokenShards(arrays, 5000)) == 1003
    with pytest.raises(AssertionError):
        TokenShards(arrays, 150).window(100, 51)
    assert index.SHARD_TOKENS == 100_000_000
