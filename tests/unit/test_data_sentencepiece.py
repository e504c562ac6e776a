"""Tests of SentencePiece models as tokenizers: ids are those of sentencepiece itself, on real text and on odd text."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path

import pytest

from llmtrain.config import DataSection
from llmtrain.data.prepare import cache_path
from llmtrain.data.sentencepiece_model import PROBES
from llmtrain.data.sources import documents
from llmtrain.data.tokenizer import check_tokenizer_exists, load_tokenizer, vocab_size
from llmtrain.errors import DataError
from tests.unit.test_data_tokenizer import ODD, ids

LLAMA = {
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    "split_digits": True, "allow_whitespace_only_pieces": True,
}  # fmt: skip
KINDS = {
    "llama": LLAMA,
    "llama without a space before the text": {**LLAMA, "add_dummy_prefix": False},
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": {**LLAMA, "model_type": "unigram"},
}
MORE = [
    "a  b",
    "trail  ",
    "\n\nx",
    "x\u200by\ufeff",
    "e\u0301 \ufb01 \uff21",
    "\x01\x02\x7f",
    "1234 5.67",
    "</s><s> x",
    "\u3000",
    "qq\u0378",
]


def texts_of(shared_data: Path, count: int) -> list[str]:
    """Return real text: documents of FineWeb and stories, and Python files, which have runs of spaces."""
    web = DataSection(source=str(shared_data / "fineweb/fineweb_sample_valid.parquet"))
    stories = DataSection(source=str(shared_data / "tinystories/train.txt"))
    sources = (web, stories, DataSection(source="stdlib"))
    return [text for data in sources for text in islice(documents(data, "train"), count)]


def trained(path: Path, texts: list[str], **options: object) -> Path:
    import sentencepiece

    model = io.BytesIO()
    given = {"vocab_size": 1000, "num_threads": 1, "minloglevel": 2, **options}
    sentences = iter([text[:2000] for text in texts])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **given)
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(shared_data: Path, tmp_path: Path, kind: str) -> None:
    from sentencepiece import SentencePieceProcessor

    texts = texts_of(shared_data, 25)
    path = trained(tmp_path / "tokenizer.model", texts, **KINDS[kind])
    pieces = SentencePieceProcessor(model_file=str(path))
    data = DataSection(tokenizer=str(path))
    check_tokenizer_exists(data)
    tokenizer = load_tokenizer(data, tmp_path / "cache")
    assert (vocab_size(tokenizer), tokenizer.eos_token, tokenizer.eos_token_id) == (1000, "</s>", 2)
    wrong = [text for text in texts + ODD + MORE + list(PROBES) if ids(tokenizer, text) != pieces.encode(text)]
    # two segmentations of a word can have the same probability in a unigram model
    assert len(wrong) <= (3 if "unigram" in kind else 0), wrong
    if "llama" in kind:
        assert all(tokenizer.decode(pieces.encode(text)) == pieces.decode(pieces.encode(text)) for text in texts)
    assert (tmp_path / "cache/tokenizer.model").read_bytes() == path.read_bytes()


def test_a_folder_with_a_model_alone_is_read_and_beside_a_tokenizer_json_is_not(
    shared_data: Path, tmp_path: Path
) -> None:
    from sentencepiece import SentencePieceProcessor

    path = trained(tmp_path / "tokenizer.model", texts_of(shared_data, 10), **LLAMA)
    pieces = SentencePieceProcessor(model_file=str(path))
    for given, cache in ((tmp_path, tmp_path / "a"), (tmp_path / "a", tmp_path / "b")):
        tokenizer = load_tokenizer(DataSection(tokenizer=str(given)), cache)
        assert all(ids(tokenizer, text) == pieces.encode(text) for text in ("  two spaces", "one"))
    names = [cache_path(DataSection(source="stories", tokenizer=str(given))).name for given in (path, tmp_path)]
    trained(path, texts_of(shared_data, 3), **LLAMA, **{"vocab_size": 900})
    assert cache_path(DataSection(source="stories", tokenizer=str(path))).name not in names


def test_a_model_that_can_not_be_converted_is_refused_in_one_line(shared_data: Path, tmp_path: Path) -> None:
    texts = texts_of(shared_data, 5)
    symbols = trained(tmp_path / "symbols.model", texts, **LLAMA, user_defined_symbols=["\n\n", "words."])
    words = trained(tmp_path / "words.model", texts, model_type="word", vocab_size=300)
    cut = tmp_path / "cut.model"
    cut.write_bytes(symbols.read_bytes()[:5000])
    silent = trained(tmp_path / "silent.model", texts, **LLAMA, eos_id=-1)
    for path, message in (
        (symbols, "this SentencePiece model can't be converted exactly .it encodes 'A text, with words"),
        (words, "a SentencePiece model of words or characters; expected BPE or unigram"),
        (cut, "not a SentencePiece model, or damaged; copy it again, or give a tokenizer.json"),
        (silent, "has no eos token; it has to separate documents"),
    ):
        with pytest.raises(DataError, match=message) as refused:
            check_tokenizer_exists(DataSection(tokenizer=str(path)))
        assert "\n" not in str(refused.value)


def test_a_trained_tokenizer_keeps_its_model_and_what_it_was_trained_on(shared_data: Path, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    source = str(shared_data / "fineweb/fineweb_sample_valid.parquet")
    data = DataSection(source=source, tokenizer="train:500", tokenizer_sample_bytes=100_000)
    tokenizer = load_tokenizer(data, tmp_path / "cache")
    pieces = SentencePieceProcessor(model_file=str(tmp_path / "cache/tokenizer.model"))
    for text in texts_of(shared_data, 20) + MORE:
        assert ids(tokenizer, text) == pieces.encode(text) or "\u2581" in text
    assert ids(tokenizer, "a\u2581b") != pieces.encode("a\u2581b"), "sentencepiece reads U+2581 as a space"
    recorded = json.loads((tmp_path / "cache/trained_on.json").read_text())
    assert recorded["source"] == source and recorded["pieces"] == 500 and 50_000 <= recorded["bytes"] <= 100_000
    more = load_tokenizer(data.model_copy(update={"tokenizer_sample_bytes": 200_000}), tmp_path / "more")
    assert json.loads((tmp_path / "more/trained_on.json").read_text())["digest"] != recorded["digest"]
    assert more.get_vocab() != tokenizer.get_vocab()


def test_the_sample_belongs_to_the_identity_of_a_trained_tokenizer_alone() -> None:
    def folder(**keys: object) -> str:
        return cache_path(DataSection(source="stories", **keys)).name

    default = {"tokenizer": "train:500"}
    assert folder(**default) == folder(**default, tokenizer_sample_bytes=10_000_000)
    assert folder(**default) != folder(**default, tokenizer_sample_bytes=20_000_000)
    assert folder(tokenizer="gpt2") == folder(tokenizer="gpt2", tokenizer_sample_bytes=20_000_000)
