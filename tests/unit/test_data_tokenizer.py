"""Tests of tokenizers: trained ones reproduce text exactly and agree with sentencepiece, and given ones need an eos
token."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, T5TokenizerFast, XGLMTokenizerFast

from llmtrain.config import DataSection
from llmtrain.data import tokenizer as module
from llmtrain.data import trained_tokenizer
from llmtrain.data.sources import documents
from llmtrain.data.tokenizer import check_tokenizer_exists, load_tokenizer, vocab_size
from llmtrain.data.tokenizing import encode, encode_without_threads
from llmtrain.data.trained_tokenizer import sample, train_tokenizer
from llmtrain.errors import DataError

SAMPLE = 10_000_000

ODD = ["", " ", "  a\t\tb\n\n  c  ", "\u2581x \u2581", "<unk>", "<0x41>", "<|endoftext|>", "日本語 ü \0 \r\n", "🙂" * 3]


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.fixture(scope="module")
def python_files() -> list[str]:
    return list(itertools.islice(documents(DataSection(source="stdlib"), "train"), 20))


def test_trained_tokenizer_round_trips_and_agrees_with_sentencepiece(python_files: list[str], tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor
    from transformers import AutoTokenizer

    new = train_tokenizer(python_files, 1000, SAMPLE, "stdlib")
    tokenizer, pieces = new.tokenizer, SentencePieceProcessor(model_proto=new.model)
    assert vocab_size(tokenizer) == 1000 and tokenizer.eos_token_id == 1
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in python_files[:10] + ODD:
        assert loaded.decode(ids(loaded, text)) == text
        assert ids(loaded, text) == ids(tokenizer, text)
        assert loaded.eos_token_id not in ids(loaded, text)
    for text in python_files[:10]:
        assert ids(loaded, text) == pieces.encode(text)
    assert sum(len(ids(loaded, text)) for text in python_files) < 0.5 * sum(map(len, python_files))


def test_training_is_deterministic(python_files: list[str]) -> None:
    first, second = (train_tokenizer(python_files[:5], 400, SAMPLE, "stdlib") for _ in range(2))
    assert first.tokenizer.backend_tokenizer.to_str() == second.tokenizer.backend_tokenizer.to_str()
    assert first.trained_on == second.trained_on and first.trained_on.documents == 5


def test_long_words_and_null_bytes_can_be_trained_on() -> None:
    texts = ["語" * 20_000 + "\0", "a b c d e f g" * 50]
    tokenizer = train_tokenizer(texts, 275, SAMPLE, "a").tokenizer
    assert tokenizer.decode(ids(tokenizer, texts[0])) == texts[0]


def test_sample_is_bounded_even_and_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{i:010d}" for i in range(1000)]
    assert sample(texts, SAMPLE) == texts
    monkeypatch.setattr(trained_tokenizer, "SPREAD", 8)
    kept = sample(texts, 1000)
    assert 500 <= sum(map(len, kept)) <= 1000
    assert len({int(b) - int(a) for a, b in itertools.pairwise(kept)}) == 1
    assert 700 < int(kept[-1]) < 800


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train:x", "expected train:SIZE with a whole number"),
        ("train:100", "this source has more characters than that; give at least train:"),
        ("train:5000", "too little text for so many pieces; give at most train:"),
    ],
)
def test_impossible_training_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(f"a few words {i}" for i in range(50)))
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(DataSection(source=str(tmp_path / "a.txt"), tokenizer=name), tmp_path / "tokenizer")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokenizer").exists()


def test_no_text_and_no_tokenizer_are_named_without_a_librarys_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(DataError, match="train:300: the source has no text to train a tokenizer on"):
        load_tokenizer(DataSection(source=str(tmp_path / "a.txt"), tokenizer="train:300"), tmp_path / "tokenizer")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: a folder without a tokenizer"):
        load_tokenizer(DataSection(source="stdlib", tokenizer=str(tmp_path / "empty")), tmp_path / "tokenizer")


def test_a_panic_of_the_tokenizers_library_is_one_line(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "x" * 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(DataError, match=r"not a tokenizer \(range .* out of range"):
            load_tokenizer(DataSection(tokenizer=str(given)), tmp_path / "cache")


def bare_tokenizer(path: Path, special: str | None) -> Path:
    """Write a tokenizer.json without a config beside it, and return its path."""
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    if special:
        tokenizer.add_special_tokens([AddedToken(special, special=True)])
    tokenizer.save(str(path))
    return path


def test_eos_is_found_in_a_bare_file_or_the_tokenizer_refused(tmp_path: Path) -> None:
    file = bare_tokenizer(tmp_path / "tokenizer.json", "</s>")
    for given in (file, tmp_path):
        cache = tmp_path / f"cache-{given.name}"
        tokenizer = load_tokenizer(DataSection(tokenizer=str(given)), cache)
        assert tokenizer.eos_token == "</s>" and tokenizer.eos_token_id == 2 and vocab_size(tokenizer) == 3
    file = bare_tokenizer(tmp_path / "none.json", None)
    with pytest.raises(DataError, match=r"none\.json has no eos token"):
        load_tokenizer(DataSection(tokenizer=str(file)), tmp_path / "other")


def test_a_kept_tokenizer_is_loaded_again(tmp_path: Path) -> None:
    file = bare_tokenizer(tmp_path / "tokenizer.json", "</s>")
    load_tokenizer(DataSection(tokenizer=str(file)), tmp_path / "cache")
    assert load_tokenizer(DataSection(tokenizer="not/there"), tmp_path / "cache").eos_token_id == 2


def test_folders_in_a_tokenizers_folder_are_none_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert module.tokenizer_files(str(tmp_path)) == [tmp_path / "tokenizer.json"]


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer: .*tokenizer\.json: not a tokenizer") as caught:
        load_tokenizer(DataSection(tokenizer=str(tmp_path / "tokenizer.json")), tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./not/there", "no/such/folder"])
def test_a_path_that_is_not_there_is_no_hub_name(tmp_path: Path, name: str) -> None:
    message = f"data.tokenizer: {name!r} is neither a file or folder here nor a model name; use a folder that has its tokenizer"
    with pytest.raises(DataError) as refused:
        load_tokenizer(DataSection(tokenizer=name), tmp_path / "cache")
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_a_tokenizer_of_the_hub_is_downloaded_if_it_was_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    file, real = bare_tokenizer(tmp_path / "tokenizer.json", "</s>"), AutoTokenizer.from_pretrained
    asked, reply = [], [OSError("there is no tokenizer\nin owner/model"), module._load_local(file)]

    def from_pretrained(name: str | Path, local_files_only: bool = False) -> object:
        if name != "owner/model":
            return real(name)
        if local_files_only:
            raise OSError("not downloaded yet")
        if isinstance(found := reply.pop(0), OSError):
            raise found
        return found

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(module, "require_on_hub", lambda name, kind, **_: asked.append((name, kind)))
    data = DataSection(tokenizer="owner/model")
    with pytest.raises(DataError) as refused:
        load_tokenizer(data, tmp_path / "cache")
    assert str(refused.value) == "data.tokenizer: owner/model: there is no tokenizer"
    assert load_tokenizer(data, tmp_path / "cache").eos_token_id == 2
    assert asked == [("owner/model", "model")] * 2, "the hub is asked before a library retries for minutes"


@pytest.mark.parametrize(("folder", "size", "eos"), [("tokenizers/gpt2", 50257, 50256), ("models/stories260K", 512, 2)])
def test_published_tokenizers(shared_data: Path, tmp_path: Path, folder: str, size: int, eos: int) -> None:
    tokenizer = load_tokenizer(DataSection(tokenizer=str(shared_data / folder)), tmp_path / "cache")
    assert (vocab_size(tokenizer), tokenizer.eos_token_id) == (size, eos)
    stories = DataSection(source=str(shared_data / "tinystories/valid.txt"))
    for text in itertools.islice(documents(stories, "train"), 20):
        assert tokenizer.decode(ids(tokenizer, text)) == text
        assert eos not in ids(tokenizer, text)


def test_training_on_stories(shared_data: Path, tmp_path: Path) -> None:
    data = DataSection(source=str(shared_data / "tinystories/valid.txt"), tokenizer="train:512")
    tokenizer = load_tokenizer(data, tmp_path / "cache")
    assert vocab_size(tokenizer) == 512
    for text in itertools.islice(documents(data, "train"), 50):
        assert tokenizer.decode(ids(tokenizer, text)) == text


@pytest.mark.parametrize("error", [RuntimeError("no such class"), ImportError("needs sentencepiece")])
def test_a_tokenizer_of_the_hub_that_can_not_be_loaded_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str, **options: bool) -> None:
        raise error

    monkeypatch.setattr(module, "require_on_hub", lambda *_, **__: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(DataError, match=rf"^data.tokenizer: some/name: can't be loaded \(.*{error}\)$"):
        module._load_hub("some/name")


PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in "abcds</>")]


def tokenizers_that_find_eos() -> dict[str, PreTrainedTokenizerBase]:
    """Return tokenizers that find eos in text, as their publishers convert them: of pieces with scores, with and without a
    class of their own, and of words."""
    pieces = Tokenizer(models.Unigram(PIECES, 2, False))
    words = Tokenizer(models.WordLevel({"?": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, unk_token="?"))
    pieces.pre_tokenizer, words.pre_tokenizer = pre_tokenizers.Metaspace(), pre_tokenizers.WhitespaceSplit()
    pieces.decoder = decoders.Metaspace()
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "pieces": PreTrainedTokenizerFast(tokenizer_object=pieces, **special),
        "t5": T5TokenizerFast(vocab=PIECES, **special),
        "xglm": XGLMTokenizerFast(vocab=PIECES, **special),
        "words": PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="?"),
    }


@pytest.mark.parametrize("kind", ["pieces", "t5", "xglm", "words"])
def test_a_text_that_quotes_eos_does_not_end_there(tmp_path: Path, kind: str) -> None:
    given = tokenizers_that_find_eos()[kind]
    given.save_pretrained(tmp_path / "given")
    texts = ["a b c", "a <s>b</s> c", "</s>", "a </s> c\n</s>"]
    before = encode_without_threads(given, texts)
    assert given.eos_token_id in before[2], "otherwise this tests nothing"
    data = DataSection(tokenizer=str(tmp_path / "given"))
    check_tokenizer_exists(data)
    found = load_tokenizer(data, tmp_path / "cache")
    after = encode_without_threads(found, texts)
    assert after == [one.ids for one in encode(found, texts)]
    assert after[0] == before[0] and not any(found.eos_token_id in ids for ids in after)
    assert vocab_size(found) == vocab_size(given) and found.eos_token == "</s>"
    assert found("a </s>", add_special_tokens=False)["input_ids"][-1] == found.eos_token_id, (
        "a prompt may still contain eos"
    )
    if kind != "words":
        assert [found.decode(ids) for ids in after[:3]] == texts[:3]


@pytest.mark.parametrize(("eos", "shown"), [("\n", r"'\\n'"), ("</s>", "'</s>'")], ids=["a character", "unknown words"])
def test_an_eos_token_that_can_t_be_hidden_is_refused(tmp_path: Path, eos: str, shown: str) -> None:
    letters = Tokenizer(models.WordLevel({eos: 0, "?": 1, "a": 2}, unk_token="?" if eos == "\n" else eos))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=eos).save_pretrained(tmp_path / "given")
    data = DataSection(tokenizer=str(tmp_path / "given"))
    for refuse in (lambda: check_tokenizer_exists(data), lambda: load_tokenizer(data, tmp_path / "cache")):
        with pytest.raises(
            DataError, match=rf"given finds its eos token {shown} in ordinary text, .*; give it another eos token"
        ):
            refuse()
    assert not (tmp_path / "cache").exists()
