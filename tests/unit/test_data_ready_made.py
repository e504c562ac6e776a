"""Tests of token files of other tools, which are read in place, split at documents and checked, and of exports in
their formats."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from llmtrain.config import DataSection
from llmtrain.data import ready_made
from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.checksum_scan import ChecksumScan
from llmtrain.data.dataset import TokenDataset, TokenShards, open_dataset
from llmtrain.data.loader import Loader, eval_batches
from llmtrain.data.prepare import prepare
from llmtrain.data.token_digests import token_digest
from llmtrain.data.token_files import read_header
from llmtrain.errors import DataError, UserError
from llmtrain.export import token_export
from llmtrain.export.separators import describe_separators
from llmtrain.export.token_export import KINDS, check_kind, export_tokens
from tests.unit.token_file_writers import EOS, VOCABULARY, write_llm_c, write_megatron, write_tokenizer

NEEDED = (500, 200)
"""Numbers of training and validation tokens that a run reads."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataSection, TokenDataset]:
    """Provide a data section and its prepared dataset: stories, and a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("ours")
    (folder / "a.txt").write_text(
        "<|endoftext|>".join(f"A story of {n} böse cats, {n * n} 🙂 dogs." for n in range(400))
    )
    data = DataSection(
        source=str(folder / "a.txt"), tokenizer="train:400", cache_dir=str(folder / "cache"), validation_fraction=0.2
    )
    return data, prepare(data, 10**6, 10**6)


def tokens_in(folder: Path, **keys: str | float) -> DataSection:
    """Return the data section of a recipe for token files in `folder`, with the tokenizer beside them."""
    given = {"source": str(folder), "tokenizer": str(folder / "tokenizer"), "cache_dir": str(folder.parent / "cache")}
    return DataSection(**{**given, **keys})


def made_by(folder: Path, ids: np.ndarray, kind: str = "nanogpt") -> Path:
    """Write tokens as another tool would, with a tokenizer, and return their folder."""
    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer")
    if kind == "nanogpt":
        ids.astype("<u2").tofile(folder / "tokens.bin")
    elif kind == "llm.c":
        write_llm_c(folder / "tokens.bin", ids)
    elif kind == "megatron":
        write_megatron(folder / "tokens.bin", ids, "<i4")
    else:
        np.save(folder / "tokens.npy", ids.astype(kind))
    return folder


def documents(lengths: list[int]) -> np.ndarray:
    """Return tokens of documents of these lengths, eos included."""
    return np.concatenate([np.r_[np.arange(length - 1) % 5, EOS] for length in lengths])


def samples(prepared: TokenDataset) -> list[np.ndarray]:
    loader = Loader(prepared.tokens("train"), BatchShape(sequence_length=32, global_batch=4, micro_batch=2, seed=7))
    train = [batch.numpy() for _ in range(20) for batch in loader.next()]
    held_out = eval_batches(
        prepared.tokens("validation"), max_tokens=300, sequence_length=32, micro_batch=2, rank=0, world=1
    )
    return train + [part.numpy() for batch in held_out for part in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_our_tokens_in_each_format_give_the_same_samples(
    ours: tuple[DataSection, TokenDataset], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, prepared = ours
    monkeypatch.setattr(token_export, "SHARD_TOKENS", 3000)
    monkeypatch.setattr(token_export, "CHUNK", 700)
    manifest = export_tokens(prepared, data, kind, tmp_path / "tokens")
    there = prepare(tokens_in(tmp_path / "tokens"), 10**6, 10**6)
    assert all(np.array_equal(a, b) for a, b in zip(samples(prepared), samples(there), strict=True))
    assert token_digest(there) == token_digest(prepared) == manifest.digest
    assert there.bytes_per_token("validation") == prepared.bytes_per_token("validation")
    assert {split.documents for split in manifest.splits.values()} == {
        entry.documents for entry in prepared.index.splits.values()
    }
    assert sorted(path.name for path in there.directory.iterdir()) == ["index.json", "tokenizer"], "nothing is copied"
    assert (tmp_path / "tokens/tokenizer/tokenizer.model").is_file()
    said = json.loads((tmp_path / "tokens/tokens.json").read_text())
    assert (said["eos"], said["vocab_size"], said["splits"]["val"]["tokens"]) == (
        "<|endoftext|>",
        400,
        len(prepared.tokens("validation")),
    )
    if kind == "llm.c":
        assert len(manifest.splits["train"].files) == 2


def test_megatrons_index_is_written_as_its_readers_expect(
    ours: tuple[DataSection, TokenDataset], tmp_path: Path
) -> None:
    data, prepared = ours
    export_tokens(prepared, data, "megatron", tmp_path / "tokens")
    raw = (tmp_path / "tokens/val.idx").read_bytes()
    entry = prepared.index.splits["validation"]
    assert struct.unpack_from("<9sQBQQ", raw) == (b"MMIDIDX\0\0", 1, 8, entry.documents, entry.documents + 1)
    sizes = np.frombuffer(raw, "<i4", entry.documents, 34)
    pointers = np.frombuffer(raw, "<i8", entry.documents, 34 + 4 * entry.documents)
    first = np.frombuffer(raw, "<i8", entry.documents + 1, 34 + 12 * entry.documents)
    tokens = np.fromfile(tmp_path / "tokens/val.bin", "<u2")
    assert len(raw) == 34 + 12 * len(sizes) + 8 * len(first) and sizes.sum() == len(tokens)
    assert (tokens[np.cumsum(sizes) - 1] == prepared.eos_id).all() and (tokens == prepared.eos_id).sum() == len(sizes)
    assert np.array_equal(pointers, 2 * (np.cumsum(sizes) - sizes)) and np.array_equal(first, np.arange(len(first)))


@pytest.mark.parametrize("kind", ["nanogpt", "llm.c", "megatron", "<u2", "<u4", "<i4", "<i8"])
def test_every_kind_is_read_where_it_is_and_split_after_a_document(tmp_path: Path, kind: str) -> None:
    ids = documents([40, 7, 120, 33, 50])
    folder = made_by(tmp_path / "tokens", ids, kind)
    prepared = prepare(tokens_in(folder, validation_fraction=0.3), *NEEDED)
    train, held_out = (prepared.tokens(split) for split in ("train", "validation"))
    assert len(train) == 200 and len(held_out) == 50, "split at the first border at or after 70 % of 250 tokens"
    read = np.concatenate([train.window(0, 200), held_out.window(0, 50)])
    assert np.array_equal(read, ids)
    assert {shard.name for split in prepared.index.splits.values() for shard in split.shards} == {
        str(next(folder.glob("tokens.*[np][py]*" if kind.startswith("<") else "tokens.bin")))
    }
    assert prepared.bytes_per_token("validation") == 49 / 50, "one byte per token, and none for eos"


@pytest.mark.parametrize("kind", ["nanogpt", "megatron"])
@pytest.mark.parametrize(("fraction", "border"), [(0.3, 167), (0.5, 167), (0.001, 167), (0.8, 167), (0.999, 40)])
def test_the_border_is_a_documents_wherever_the_fraction_falls(
    tmp_path: Path, kind: str, fraction: float, border: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_made, "DECODED_TOKENS", 16)
    ids = documents([40, 127, 83])
    prepared = prepare(tokens_in(made_by(tmp_path / "tokens", ids, kind), validation_fraction=fraction), *NEEDED)
    assert len(prepared.tokens("train")) == border


def test_shards_pairs_patterns_and_names_are_found(tmp_path: Path) -> None:
    ids = documents([9] * 30)
    folder = made_by(tmp_path / "a", ids, "llm.c")
    (folder / "tokens.bin").rename(folder / "f_train_000001.bin")
    write_llm_c(folder / "f_train_000002.bin", ids[: 9 * 5])
    write_llm_c(folder / "f_val_000000.bin", ids[: 9 * 4])
    named = prepare(tokens_in(folder), *NEEDED)
    keys = {"source": str(folder / "f_train_*.bin"), "validation": str(folder / "f_val_000000.bin")}
    by_pattern = prepare(tokens_in(folder, **keys), *NEEDED)
    keys["source"] = str(folder)
    of_folder = prepare(tokens_in(folder, **keys), *NEEDED)
    for prepared in (named, by_pattern, of_folder):
        assert [len(prepared.tokens(split)) for split in ("train", "validation")] == [315, 36]
        assert np.array_equal(prepared.tokens("train").window(265, 10), np.r_[ids[265:], ids[:5]])
    pair = made_by(tmp_path / "b", ids, "megatron")
    for name in ("tokens", "tokens.bin", "tokens.idx"):
        found = prepare(tokens_in(pair, source=str(pair / name)), *NEEDED)
        assert found.index.ready_made.kind == "megatron"
    (pair / "notes.txt").write_text("text")
    assert ready_made.find_ready_made(tokens_in(pair)) is None, "a folder that also has text is not read as token files"


def test_only_the_tokens_asked_for_are_decoded_and_a_longer_run_decodes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tokens_in(made_by(tmp_path / "tokens", documents([20] * 50)), validation_fraction=0.5)
    decoded, count = [], ready_made.count_text_bytes
    monkeypatch.setattr(
        ready_made, "count_text_bytes", lambda tokens, prepared: decoded.append(len(tokens)) or count(tokens, prepared)
    )
    first = prepare(data, 100, 99)
    assert first.bytes_per_token("validation") == 95 / 100 and prepare(data, 100, 99).directory == first.directory
    longer = prepare(data, 200, 199)
    assert longer.directory == first.directory and longer.bytes_per_token("validation") == 190 / 200
    assert prepare(data, 100, 99).bytes_per_token("validation") == 95 / 100 and decoded == [100, 200]
    assert len(prepare(data.model_copy(update={"max_tokens": 60}), 100, 99).tokens("train")) == 60


def test_bytes_are_those_of_the_text_also_of_long_documents_and_cut_characters(
    ours: tuple[DataSection, TokenDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, prepared = ours
    text = "Two 🤖 and 💩💩"
    end, ids = [prepared.eos_id], prepared.load_tokenizer()(text, add_special_tokens=False)["input_ids"]
    size = len(text.encode())
    for tokens, expected in (
        (ids + end + ids + end, 2 * size),
        (ids + end + ids, 2 * size),
        (ids + end + ids[:-1], 2 * size - 4),
        (ids + end + ids[:-3], 2 * size - 4),
        (ids + end + ids[:-4], 2 * size - 4),
        (end + end, 0),
    ):
        for most in (1 << 20, len(ids)):
            monkeypatch.setattr(ready_made, "DECODED_TOKENS", most)
            counted = ready_made.count_text_bytes(TokenShards([np.array(tokens)]), prepared)
            assert counted == expected, (tokens, most)


def test_tokens_without_eos_are_noted_and_refused_where_documents_must_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.arange(400) % 5
    write_tokenizer(tmp_path / "tokens/tokenizer")
    write_megatron(tmp_path / "tokens/a.bin", ids, "<u2", lengths=[100, 250, 50])
    prepared = prepare(tokens_in(tmp_path / "tokens", validation_fraction=0.2), *NEEDED, show_progress=True)
    assert len(prepared.tokens("train")) == 350, "Megatron's own borders separate the splits"
    said = capsys.readouterr().out
    assert "reading 1 megatron file in place" in said and "note: " in said and "documents are not separated" in said
    with pytest.raises(DataError, match=r"train.document_mask: .* eos token <eos> .* does not occur; .*--append-eod"):
        ready_made.check_separators(prepared, "train.document_mask")
    plain = made_by(tmp_path / "plain", ids)
    with pytest.raises(DataError, match=r"no eos token where validation documents could begin; give data.validation"):
        prepare(tokens_in(plain), *NEEDED)
    assert not list((tmp_path / "cache").glob("plain*[0-9a-f]")), "nothing is left of a folder that could not be used"


def test_a_validation_text_needs_no_eos(tmp_path: Path) -> None:
    folder = made_by(tmp_path / "tokens", documents([50] * 10))
    (np.arange(400) % 5).astype("<u2").tofile(folder / "val.bin")
    ready_made.check_separators(prepare(tokens_in(folder), *NEEDED), "train.document_mask")


def test_tokens_without_a_header_are_not_read_as_uint16_if_they_can_not_be(tmp_path: Path) -> None:
    ids = documents([50] * 10)
    folder = made_by(tmp_path / "tokens", ids)
    index = prepare(tokens_in(folder), *NEEDED).index.model_copy(update={"vocab_size": 70_000})
    line = r"tokens\.bin: without a header, its tokens are read as uint16"
    with pytest.raises(DataError, match=rf"{line}, too small for the 70,000 tokens of data\.tokenizer=.*; convert it"):
        ready_made.check_sample([read_header(folder / "tokens.bin")], index)
    ids.astype("<u4").tofile(folder / "tokens.bin")
    with pytest.raises(DataError, match=rf"{line}, but every second one is 0, as if they were uint32"):
        prepare(tokens_in(folder), *NEEDED)


def test_every_token_is_checked_in_the_background_and_a_sample_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_made, "SAMPLE_TOKENS", 4)
    monkeypatch.setattr(ready_made, "SAMPLES", 3)
    monkeypatch.setattr("llmtrain.data.token_ids.BUFFER_TOKENS", 64)
    ids = documents([100] * 10)
    ids[301] = VOCABULARY
    folder = made_by(tmp_path / "tokens", ids)
    ids[701] = 60_000
    prepared = prepare(tokens_in(folder, validation_fraction=0.2), *NEEDED)
    scan = ChecksumScan([prepared], 0, 1)
    scan._thread.join()
    assert f"tokens.bin: token 301 is {VOCABULARY}, but data.tokenizer=" in str(scan.problem)
    assert "has 7 tokens" in str(scan.problem)
    monkeypatch.setattr(ready_made, "SAMPLES", 400)
    with pytest.raises(
        DataError, match=r"tokens.bin: token 301 is 7, but data.tokenizer=.* has 7 tokens; name the tokenizer"
    ):
        prepare(tokens_in(folder, validation_fraction=0.3), *NEEDED)


def test_a_second_file_is_named_with_the_position_in_it(tmp_path: Path) -> None:
    folder = made_by(tmp_path / "tokens", documents([10] * 10))
    np.r_[documents([10]), 9, documents([5])].astype("<u2").tofile(folder / "u.bin")
    with pytest.raises(DataError, match=r"u.bin: token 10 is 9, but"):
        prepare(tokens_in(folder), *NEEDED)


def test_files_that_are_held_out_are_not_trained_on_though_another_run_did(tmp_path: Path) -> None:
    """All runs read the files in the same order, so that only the border between the splits differs."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    write_tokenizer(folder / "tokenizer")
    for name in "abc":
        documents([40] * 5).astype("<u2").tofile(folder / f"{name}.bin")
    counts = []
    for held_out in (None, "c.bin", "[bc].bin", "c.bin", None):
        keys = {} if held_out is None else {"validation": str(folder / held_out)}
        prepared = prepare(tokens_in(folder, validation_fraction=0.1, **keys), 10, 10)
        counts.append(prepared.index.splits["train"].tokens)
    assert counts == [560, 400, 200, 400, 560]


def test_one_token_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no eos token where validation documents could begin"):
        prepare(tokens_in(made_by(tmp_path / "one", np.array([EOS]))), *NEEDED)


def test_files_that_change_are_read_anew(tmp_path: Path) -> None:
    data = tokens_in(made_by(tmp_path / "tokens", documents([10] * 20)))
    before = prepare(data, *NEEDED)
    documents([20] * 20).astype("<u2").tofile(tmp_path / "tokens/tokens.bin")
    after = prepare(data, *NEEDED)
    assert after.directory != before.directory and len(after.tokens("train")) == 380
    with pytest.raises(DataError, match=r"tokens.bin: 800 bytes found, 400 expected"):
        open_dataset(before.directory)


def test_a_vocabulary_too_large_for_uint16_is_written_in_more_bytes_or_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--format nanogpt: a vocabulary of 70,000, but .* uint16"):
        check_kind("nanogpt", 70_000)
    ids = np.r_[69_999, documents([6] * 9), 65_536]
    for kind, dtype in (("llm.c", "<u4"), ("megatron", "<i4"), ("npy", "<u4")):
        written = token_export.WRITERS[kind](
            TokenShards([ids]), "t", tmp_path, np.dtype(dtype), token_export.DocumentLengths(EOS)
        )
        file = read_header(tmp_path / written[0])
        assert (file.kind, file.dtype) == (kind, dtype) and np.array_equal(
            np.fromfile(file.path, dtype, offset=file.offset), ids
        )


def test_documents_are_counted_across_parts() -> None:
    ids = np.r_[documents([3, 1, 9, 4]), 1, 2]
    for size in (1, 2, 5, 100):
        found = token_export.DocumentLengths(EOS)
        for start in itertools.count(0, size):
            if start >= len(ids):
                break
            found.add(ids[start : start + size])
        assert found.lengths().tolist() == [3, 1, 9, 4, 2] and found.count == 4


def test_an_export_replaces_only_an_export(ours: tuple[DataSection, TokenDataset], tmp_path: Path) -> None:
    data, prepared = ours
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/work.txt").write_text("work")
    with pytest.raises(
        UserError, match=r"mine exists and is not exported tokens; choose another folder: prepare RECIPE"
    ):
        export_tokens(prepared, data, "npy", tmp_path / "mine")
    assert (tmp_path / "mine/work.txt").read_text() == "work"
    for kind in ("npy", "nanogpt"):
        export_tokens(prepared, data, kind, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "tokenizer",
        "tokens.json",
        "train.bin",
        "val.bin",
    ]


def test_a_model_card_says_what_was_between_texts(ours: tuple[DataSection, TokenDataset], tmp_path: Path) -> None:
    """The card says that every text ended with eos only if llmtrain tokenized the text. For token files, it says whether
    they contain eos."""
    hub = DataSection(source="hf:owner/name")
    separated = tokens_in(made_by(tmp_path / "separated", documents([20] * 20)), validation_fraction=0.2)
    write_tokenizer(tmp_path / "joined/tokenizer")
    write_megatron(tmp_path / "joined/a.bin", np.arange(400) % 5, "<u2", lengths=[100, 250, 50])
    joined = tokens_in(tmp_path / "joined", validation_fraction=0.2)
    for data in (separated, joined):
        prepare(data, *NEEDED)
    for data, said in (
        (hub, "In training every text ended with <e> and nothing else was added: begin a prompt"),
        (ours[0].model_copy(update={"packing": "none"}), "In training every text ended with <e> and"),
        (separated, "In training <e> was between texts, as in the token files that were read: begin a prompt"),
        (joined, "In training all texts were read from token files in which <e> does not occur: "),
        (
            DataSection(source="gone.bin"),
            "In training <e> was between texts, unless token files were read that lack it: ",
        ),
        (
            DataSection(
                sources=({"source": "stories"}, {"source": joined.source}),
                tokenizer=joined.tokenizer,
                cache_dir=joined.cache_dir,
                validation_fraction=0.2,
            ),
            "In training some texts were read from token files",
        ),
    ):
        assert describe_separators(data, "<e>").startswith(said), data.source
