"""Tests of preparing: what is written, reused, extended, and kept after an interruption, and what is refused."""

from __future__ import annotations

import errno
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmtrain.config import DataSection
from llmtrain.data import dataset, tokenizing
from llmtrain.data import extend as extending
from llmtrain.data import prepare as module
from llmtrain.data.dataset import ShardWriter, TokenDataset, TokenShards, open_dataset
from llmtrain.data.prepare import prepare
from llmtrain.data.sources import TextStream, documents
from llmtrain.errors import DataError
from tests.mother import session
from tests.unit import processes
from tests.unit.test_data_damage import all_tokens, searched

TEXTS = [f"Document {i}.\n\n  It says <|endoftext|> {i * i} times.\té" for i in range(400)]


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    source = tmp_path / "stories.txt"
    source.write_text("\n~~~\n".join(TEXTS))
    keys = {"tokenizer": "train:320", "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    return DataSection(source=str(source), separator="\n~~~\n", **keys)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extending, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 40)


def texts_of(prepared: TokenDataset, split: str) -> list[str]:
    tokens = prepared.tokens(split)
    ids = tokens.window(0, len(tokens))
    *documents, rest = np.split(ids, np.flatnonzero(ids == prepared.eos_id) + 1)
    assert not len(rest)
    tokenizer = prepared.load_tokenizer()
    return [tokenizer.decode(document[:-1]) for document in documents]


def made(prepared: TokenDataset) -> int:
    """Return when the index was written."""
    return (prepared.directory / "index.json").stat().st_mtime_ns


def cached(data: DataSection) -> list[str]:
    return sorted(path.name for path in Path(data.cache_dir).iterdir() if path.is_dir())


@pytest.mark.usefixtures("small_batches")
def test_text_survives_and_counts_are_true(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "SHARD_TOKENS", 700)
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
    assert searched(prepared) is None


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
    assert searched(prepared) is None


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
    assert len(prepare(data, 10, 100).tokens("train")) > 3000, "without a limit, files are tokenized whole"


def test_other_choices_go_to_other_folders(data: DataSection) -> None:
    prepare(data, 100, 100)
    for change in ({"tokenizer": "train:330"}, {"validation_fraction": 0.3}, {"separator": "~~~"}):
        prepare(data.model_copy(update=change), 100, 100)
    assert len(cached(data)) == 4
    Path(data.source).write_text("\n~~~\n".join([*TEXTS, "one more"]))
    prepare(data, 100, 100)
    assert len(cached(data)) == 5


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Provide a list to which texts are added as they are tokenized."""
    texts, tokenize = [], tokenizing.tokenize

    def counted(tokenizer: object, batch: list[tuple[str, str]]) -> object:
        texts.extend(text for _, text in batch)
        return tokenize(tokenizer, batch)

    monkeypatch.setattr(tokenizing, "tokenize", counted)
    return texts


def interrupted_after(count: int, error: type[BaseException]) -> type[TextStream]:
    class Interrupted(TextStream):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            for number, found in enumerate(super().__iter__()):
                if number == count:
                    raise error
                yield found

    return Interrupted


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError])
def test_what_was_tokenized_before_an_interruption_is_kept(
    data: DataSection, monkeypatch: pytest.MonkeyPatch, tokenized: list[str], error: type[BaseException]
) -> None:
    whole = prepare(data.model_copy(update={"cache_dir": data.cache_dir + "-whole"}), 10**9, 10**9)
    assert sorted(tokenized) == sorted(TEXTS), "one pass for both splits"
    tokenized.clear()

    monkeypatch.setattr(extending, "TextStream", interrupted_after(150, error))
    for so_far in (150, 300):
        with pytest.raises(error):
            prepare(data, 10**9, 10**9)
        left = open_dataset(module.cache_path(data))
        counts = sum(split.documents for split in left.index.splits.values())
        assert so_far - 150 < counts <= so_far and not left.index.splits["train"].exhausted
        assert all_tokens(left, "train") == all_tokens(whole, "train")[: left.index.splits["train"].tokens]
    monkeypatch.setattr(extending, "TextStream", TextStream)
    prepared = prepare(data, 10**9, 10**9)
    assert {split: all_tokens(prepared, split) for split in ("train", "validation")} == {
        split: all_tokens(whole, split) for split in ("train", "validation")
    }
    assert sorted(tokenized) == sorted(TEXTS), "no text is tokenized twice"
    assert searched(prepared) is None
    named = {shard.name for split in prepared.index.splits.values() for shard in split.shards}
    assert named == {path.name for path in prepared.directory.glob("*.npy")}


@pytest.mark.usefixtures("small_batches")
def test_a_longer_run_adds_to_what_is_there(
    data: DataSection, tokenized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if one split was read further than the other, and an interruption comes before its position is
    reached again."""
    few = prepare(at_most(data, 500), 500, 1500)
    first = {path.name: path.read_bytes() for path in few.directory.glob("*.npy")}
    assert few.index.splits["train"].position.documents < few.index.splits["validation"].position.documents
    more = prepare(at_most(data, 700), 700, 100)
    assert more.index.splits["validation"] == few.index.splits["validation"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(extending, "TextStream", interrupted_after(30, KeyboardInterrupt))
        prepare(data, 10**9, 10**9)
    assert open_dataset(few.directory).index.splits["validation"] == few.index.splits["validation"]
    everything = prepare(data, 10**9, 10**9)
    assert len(tokenized) == len(TEXTS) == len(set(tokenized))
    assert all((few.directory / name).read_bytes() == content for name, content in first.items())
    for split in ("train", "validation"):
        assert texts_of(everything, split) == list(documents(data, split))
    assert searched(few) is None and searched(everything) is None, "the earlier index is still valid"


@pytest.mark.usefixtures("small_batches")
def test_commits_are_made_while_text_is_read(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extending, "COMMIT_SECONDS", 0.0)
    prepared = prepare(data, 10**9, 10**9)
    assert texts_of(prepared, "train") == list(documents(data, "train"))
    assert len(prepared.index.splits["train"].shards) > 10


def test_a_hub_that_breaks_off_is_read_on(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start reads the same commit of the dataset, from the file in which the last start stopped."""
    import datasets

    read, revisions = [], []

    def rows(parts: list[int]) -> Iterator[dict[str, str]]:
        for part in parts:
            for row in range(40):
                if len(read) == 150:
                    read.append((part, row))
                    raise ConnectionResetError("connection reset by peer")
                read.append((part, row))
                yield {"text": TEXTS[part * 40 + row]}

    def load(name: str, subset: None, *, split: str, streaming: bool, revision: str) -> datasets.IterableDataset:
        revisions.append(revision)
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": list(range(10))})

    newest = iter("abc")
    monkeypatch.setattr("llmtrain.data.hub.require_on_hub", lambda *_, **__: next(newest))
    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr(extending, "BATCH_CHARACTERS", 1000)
    local = prepare(data.model_copy(update={"cache_dir": data.cache_dir + "-local"}), 10**9, 10**9)
    tokenizer = {"tokenizer": str(local.directory / "tokenizer"), "source": "hf:o/d"}
    with pytest.raises(DataError, match=r"reading it from the hub failed .*; start the same command again"):
        prepare(data.model_copy(update=tokenizer), 10**9, 10**9)
    broken = len(read)
    prepared = prepare(data.model_copy(update=tokenizer), 10**9, 10**9)
    assert revisions == ["a", "a"] and read[broken][0] == 3, "whole files are skipped"
    for split in ("train", "validation"):
        assert all_tokens(prepared, split) == all_tokens(local, split)


def test_processes_that_start_together_prepare_once(data: DataSection) -> None:
    started = [session().fork(processes.prepare_and_say_when, data.model_dump_json(), capture=True) for _ in range(3)]
    times = {process.communicate(timeout=100)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert times == {f"{made(prepare(data, 500, 100))}\n"} and len(cached(data)) == 1


def test_waiting_says_for_what_and_ends(
    data: DataSection, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(data.cache_dir).mkdir()
    holder = session().fork(processes.hold_lock, f"{module.cache_path(data)}.lock", capture=True)
    assert holder.stdout.readline() == "held\n"
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.2)
    with pytest.raises(DataError, match=r"another process has held this lock for 0\.2 s"):
        prepare(data, 100, 100, show_progress=True)
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
    assert re.search(
        r"train-00000\.npy on .*: checksum .* found, .* expected", searched(open_dataset(prepared.directory))
    )
    index = prepared.directory / "index.json"
    index.write_text(index.read_text().replace('"format": 2', '"format": 3'))
    refused(r"index\.json: format: Input should be 2")
    index.write_text("{")
    refused(r"index\.json: the file: Invalid JSON")
    index.unlink()
    refused(r"index\.json: no such file")


@pytest.mark.parametrize("tokens", [1000, 10_000], ids=["enough", "too few"])
def test_a_lost_tokenizer_is_named(data: DataSection, tokens: int) -> None:
    prepared = prepare(data.model_copy(update={"max_tokens": 2000}), 1000, 100)
    shutil.rmtree(prepared.directory / "tokenizer")
    with pytest.raises(DataError, match=r"tokenizer_config.json: no such file; .*; delete .* and prepare again"):
        prepare(data.model_copy(update={"max_tokens": tokens}), 1000, 100)


def test_a_split_without_documents_is_refused(data: DataSection) -> None:
    with pytest.raises(
        DataError, match=r"no validation documents; give more of them, change data\.validation_f.*=FILE$"
    ):
        prepare(data.model_copy(update={"validation_fraction": 1e-9}), 10, 10)
    assert cached(data) == []


def test_a_cache_that_can_t_be_written_is_named(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    for given in (data.source, "/proc"):  # a file, and a folder in which no folder can be made
        with pytest.raises(DataError, match=rf"data\.cache_dir: {given}: .*; expected a folder to write in"):
            prepare(data.model_copy(update={"cache_dir": given}), 100, 100)


def test_a_disk_that_fails_is_not_taken_for_a_full_one(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error keeps its traceback, because no change of the recipe would help."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "extend", fail)
    with pytest.raises(OSError, match="Input/output error") as failed:
        prepare(data, 100, 100)
    assert not isinstance(failed.value, DataError)


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
def test_shards_are_plain_npy_read_as_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    everything = np.random.default_rng(0).integers(0, 60_000, 1003).astype(dtype)
    assert dataset.SHARD_TOKENS == 100_000_000
    monkeypatch.setattr(dataset, "SHARD_TOKENS", 100)
    writer = ShardWriter(tmp_path, "train", np.dtype(dtype))
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
    assert all(np.shares_memory(tokens.window(start, 100), arrays[start // 100]) for start in (0, 100, 900)), "views"
    assert len(TokenShards(arrays, 150)) == 150 and len(TokenShards(arrays, 5000)) == 1003
    with pytest.raises(AssertionError):
        TokenShards(arrays, 150).window(100, 51)


def test_a_long_file_name_is_cut_in_the_name_of_the_folder(data: DataSection, tmp_path: Path) -> None:
    source = tmp_path / f"{'x' * 225}.txt"
    source.write_text("a text")
    folder = module.cache_path(data.model_copy(update={"source": str(source)}))
    assert re.fullmatch(r"x{100}-[0-9a-f]{8}", folder.name)


@pytest.mark.usefixtures("small_batches")
def test_the_time_left_of_a_whole_file_is_not_guessed(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(at_most(data, 501), 500, 100)
    goals: list[int] = []
    bar = extending.ProgressBar
    monkeypatch.setattr(
        extending, "ProgressBar", lambda label, goal, show: goals.append(goal) or bar(label, goal, show)
    )
    prepare(data, 500, 100)
    assert goals == [sys.maxsize]
