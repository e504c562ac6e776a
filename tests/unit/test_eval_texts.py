"""Tests of losses on texts and of texts that a model writes, without a trained model."""

from __future__ import annotations

import gzip
import math
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from llmtrain.data import tokenizing
from llmtrain.errors import DataError, ModelError, UserError
from llmtrain.eval import harness, texts
from llmtrain.eval.texts import (
    LONGEST_WINDOW,
    Loaded,
    evaluate_text,
    generate,
    load_model_and_tokenizer,
    losses,
    read_documents,
    write_samples,
)
from llmtrain.export.export import training_context
from llmtrain.export.folder import write_manifest, written_files
from llmtrain.export.parity import without_progress_bars
from llmtrain.suites import SamplesSection, TextSection
from tests.unit.test_export import byte_tokenizer
from tests.unit.test_export_folder import MANIFEST


def test_documents_are_what_lies_between_separators() -> None:
    assert read_documents(StringIO("a\n<|>\n\n<|> b <|>c<|>"), "<|>", every=1, limit=None) == ["a", "b", "c"]
    assert read_documents(StringIO("a<|>b<|>c<|>d<|>e"), "<|>", every=2, limit=2) == ["a", "c"]


def test_a_text_is_not_read_beyond_its_limit() -> None:
    class Endless(StringIO):
        def read(self, size: int = -1) -> str:
            assert self.tell() < 8 * size
            return super().read(size)

    file = Endless("a<|>" * (1 << 22))
    assert read_documents(file, "<|>", every=2, limit=3) == ["a"] * 3


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_afterwards_as_they_were(shown: bool) -> None:
    before = logging.is_progress_bar_enabled()
    set_to = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    try:
        set_to[shown]()
        with without_progress_bars():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() is shown
    finally:
        set_to[before]()


class Letters:
    """Tokenizer with a token for each of three letters."""

    bos_token_id, eos_token_id = None, 3

    def __call__(self, texts: list[str], **_: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [["abc".index(letter) for letter in text] for text in texts]}


class Guessing:
    """Model to which all four tokens are equally likely."""

    config, device = SimpleNamespace(vocab_size=4), "cpu"

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []

    def __call__(self, inputs: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.read.append(tuple(inputs.shape))
        return SimpleNamespace(logits=torch.zeros(*inputs.shape, 4))


@pytest.mark.parametrize(
    ("texts", "read"),
    [
        (["abc", "ab"], [(2, 3)]),
        (["abc"] * 4, [(2, 3), (2, 3), (1, 3)]),
        (["abc", "abc", "ab"], [(2, 3), (2, 3)]),
        (["a"], [(1, 1)]),
    ],
    ids=["whole windows", "batches of two", "a padded one at the end", "only a shorter one"],
)
def test_every_token_but_the_first_is_predicted_once(texts: list[str], read: list[tuple[int, int]]) -> None:
    model = Guessing()
    nll, tokens = losses(texts, Loaded(model, Letters()), window=3, batch_size=2)
    assert model.read == read
    assert tokens == [len(text) + 1 for text in texts[:-1]] + [len(texts[-1])]
    assert nll == pytest.approx([count * math.log(4) for count in tokens])


def test_long_documents_are_tokenized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded(Letters):
        calls: ClassVar[list[list[str]]] = []

        def __call__(self, texts: list[str], **_: bool) -> dict[str, list[list[int]]]:
            self.calls.append(texts)
            return super().__call__(texts)

    texts = ["abcab", "abc" * 6, "a"]
    expected = losses(texts, Loaded(Guessing(), Letters()), window=4, batch_size=2)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 2)
    monkeypatch.setattr(tokenizing, "PIECES_AT_ONCE", 4)
    assert losses(texts, Loaded(Guessing(), Recorded()), window=4, batch_size=2) == expected
    assert Recorded.calls == [["ab", "ca", "b", "ab", "ca"], ["bc", "ab", "ca", "bc"], ["ab", "ca", "bc", "a"]]
    assert expected[1] == [6, 19, 1]


@pytest.mark.parametrize("window", [8, 9])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "opt", "llama"])
def test_a_window_fits_into_the_positions_that_a_model_has_learned(tmp_path: Path, kind: str, window: int) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "ffn_dim": 8}
    own = {"attention_types": [[["global"], 1]], "num_layers": 1, "num_heads": 2} if kind == "gpt_neo" else sizes
    special = {"bos_token_id": 0, "eos_token_id": 3, "pad_token_id": None, "word_embed_proj_dim": 8}
    config = AutoConfig.for_model(kind, vocab_size=4, max_position_embeddings=8, **{"hidden_size": 8} | own | special)
    model = AutoModelForCausalLM.from_config(config)
    model.name_or_path = "models/short"
    (tmp_path / "text").write_text("abc" * 4)
    section = TextSection(name="letters", file="text", window=window)
    if window == 8 or kind == "llama":
        assert (
            evaluate_text(section, tmp_path / "text", None, Loaded(model, Letters()), 2).scores["letters"]["tokens"]
            == 12
        )
        return
    with pytest.raises(ModelError) as refused:
        evaluate_text(section, tmp_path / "text", None, Loaded(model, Letters()), 2)
    assert str(refused.value) == (
        "letters: window is 9, but models/short has learned 8 positions; give at most as many in the suite, or leave window out"
    )


@pytest.mark.parametrize(("bos", "eos", "first"), [(0, 7, 0), (None, 7, 7), (None, None, None)])
def test_a_text_begins_with_bos_or_else_eos(bos: int | None, eos: int | None, first: int | None) -> None:
    loaded = Loaded(None, SimpleNamespace(bos_token_id=bos, eos_token_id=eos, name_or_path="models/odd"))
    if first is not None:
        assert loaded.first_token == first
        return
    with pytest.raises(ModelError) as refused:
        _ = loaded.first_token
    assert str(refused.value).startswith(
        "models/odd: the tokenizer has neither a bos nor an eos token, one of which must begin a text"
    )


def test_a_continuation_keeps_the_space_that_its_tokenizer_strips_from_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stripping:
        """Tokenizer of words whose tokens include the space before the word. `decode` strips the space before the first word."""

        words = ("▁once", "▁upon", "▁a", "▁time")

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [self.words.index(f"▁{word}") for word in text.split()]}

        def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
            return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    config = SimpleNamespace(max_position_embeddings=64, vocab_size=4)
    model = SimpleNamespace(config=config, generation_config=GenerationConfig())
    monkeypatch.setattr(texts, "folder_to_load", lambda folder, step: folder)
    monkeypatch.setattr(texts, "load_model_and_tokenizer", lambda folder: Loaded(model, Stripping()))
    monkeypatch.setattr(texts, "_continuation", lambda model, ids, *_, **__: [2, 3])
    assert generate(Path(), "once upon") == "once upon a time"
    assert generate(Path(), "once  upon") == "once  upon a time"


def test_the_default_window_is_no_longer_than_training_sequences() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=4, max_position_embeddings=8, hidden_size=8, num_attention_heads=2
    )
    model = SimpleNamespace(config=config)
    assert [Loaded(model, None, length).window for length in (None, 5, 20)] == [8, 5, 8]
    assert Loaded(SimpleNamespace(config=SimpleNamespace()), None).window == LONGEST_WINDOW


def tiny(kind: str, positions: int) -> Any:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    special = {"bos_token_id": 256, "eos_token_id": 256}
    config = AutoConfig.for_model(kind, vocab_size=257, max_position_embeddings=positions, **sizes, **special)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "length", "start", "known"),
    [("gpt2", 6, None, 6), ("gpt2", 8, None, None), ("gpt2", 6, {"path": "else"}, None), ("llama", 6, None, None)],
)
def test_an_export_knows_the_positions_that_training_has_reached(
    kind: str, length: int, start: dict | None, known: int | None
) -> None:
    data, train = SimpleNamespace(packing="packed"), SimpleNamespace(sequence_length=length, document_mask=False)
    source = SimpleNamespace(recipe=SimpleNamespace(train=train, data=data), state={"from_weights": start})
    found = {"sequence_length": length, "trained_positions": known, "separate_documents": False}
    assert training_context(source, tiny(kind, 8)) == found
    data.packing = "none"
    assert training_context(source, tiny(kind, 8))["separate_documents"]
    data.packing, train.document_mask = "packed", True
    assert training_context(source, tiny(kind, 8))["separate_documents"]


def test_a_model_of_separate_documents_reads_them_one_by_one() -> None:
    """Each token, and the eos token at the end, is predicted from a window of this document alone, as in training without packing."""
    model, documents = tiny("llama", 8), ["abcab", "a", "cbacbacba", "bb"]
    apart = Loaded(model, Letters(), separate_documents=True)
    nll, tokens = losses(documents, apart, window=4, batch_size=3)
    assert tokens == [len(document) + 1 for document in documents]
    for document, found in zip(documents, nll, strict=True):
        ids, expected = torch.tensor([3, *("abc".index(letter) for letter in document), 3]), 0.0
        for start in range(0, len(ids) - 1, 4):
            row = ids[start : start + 5]
            logits = model(row[None, :-1]).logits[0]
            expected += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
        assert found == pytest.approx(expected, rel=1e-5)
    assert losses(["a", "b", "c"], apart, 8, 1)[0][1] != losses(["a", "b", "c"], Loaded(model, Letters()), 8, 1)[0][1]


def fake_harness(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Make lm-eval load `model`, whatever the folder has."""
    named = dict.fromkeys(("loglikelihood", "loglikelihood_rolling", "generate_until"), print)
    fake = SimpleNamespace(HFLM=lambda **how: SimpleNamespace(how=how, model=model, **named))
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, fake)


def test_weights_that_a_folder_lacks_are_not_drawn_at_random_to_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", 8)
    without = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=without)
    byte_tokenizer().save_pretrained(tmp_path)
    fake_harness(monkeypatch, model)
    for load in (load_model_and_tokenizer, lambda folder: harness.load_model(folder, 1, "cpu")):
        with pytest.raises(
            ModelError, match=r"lacks weights of the model in its config\.json, such as lm_head\.weight"
        ):
            load(tmp_path)


def test_losses_are_summed_in_fp64_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every GPU has fp64: Apple's GPUs do not."""
    order = []
    for name in ("cpu", "double"):
        convert = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda tensor, name=name, convert=convert: order.append(name) or convert(tensor)
        )
    losses(["abc"], Loaded(Guessing(), Letters()), window=3, batch_size=2)
    assert order == ["cpu", "double"]


def test_learned_positions_that_training_has_not_reached_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, prompts, windows and questions end at the length of training sequences, because later positions are still random."""
    tiny("gpt2", 8).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    known = {"sequence_length": 6, "trained_positions": 6, "files": written_files(tmp_path)}
    write_manifest(tmp_path, MANIFEST.model_copy(update=known))
    asked = []
    monkeypatch.setattr(texts, "_continuation", lambda model, ids, tokens, *_, **__: asked.append(tokens) or [0])
    generate(tmp_path, "abc", tokens=20)
    loaded = load_model_and_tokenizer(tmp_path)
    write_samples(SamplesSection(prompts=["abc"], tokens=20), loaded)
    assert asked == [6 - len("_abc"), 6 - len("_abc")]
    with pytest.raises(UserError, match="--prompt has 6 tokens, but the model has room for 6, including one new token"):
        generate(tmp_path, "12345")
    with pytest.raises(
        ModelError, match=r"a prompt has 6 tokens, but .* has learned 6 positions, one of which a new token needs"
    ):
        write_samples(SamplesSection(prompts=["12345"]), loaded)
    (tmp_path / "text").write_text("abc")
    with pytest.raises(ModelError, match=r"letters: window is 7, but .* has learned 6 positions"):
        evaluate_text(TextSection(name="letters", file="text", window=7), tmp_path / "text", None, loaded, 1)
    fake_harness(monkeypatch, loaded.model)
    assert harness.load_model(tmp_path, 1, "cpu").how["max_length"] == 6


def test_the_standard_error_of_a_perplexity_follows_that_of_the_loss(tmp_path: Path, monkeypatch) -> None:
    """This is the delta method: the derivative of exp is exp."""
    monkeypatch.setattr(texts, "losses", lambda documents, *_: ([30.0, 90.0, 60.0], [10, 20, 20]))
    (tmp_path / "text.txt").write_text("one|two|three")
    section = TextSection(name="text", file="text.txt", separator="|", window=8)
    loaded = SimpleNamespace(model=None, positions=None, separate_documents=False)
    scores = texts.evaluate_text(section, tmp_path / "text.txt", None, loaded, 1).scores["text"]
    assert scores["loss"] == pytest.approx(3.6) and scores["perplexity"] == pytest.approx(math.exp(3.6))
    assert scores["loss_stderr"] > 0
    assert scores["perplexity_stderr"] == pytest.approx(math.exp(3.6) * scores["loss_stderr"])


@pytest.mark.parametrize(
    ("content", "message"), [(b"caf\xe9", "not UTF-8 .*; convert it first"), (b" | | ", "has no text between")]
)
def test_a_text_to_be_evaluated_that_is_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts.evaluate_text(TextSection(name="text", file="text.txt", separator="|"), path, None, SimpleNamespace(), 1)


def test_a_compressed_text_is_evaluated_as_what_it_contains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "learned_positions", lambda model: None)
    (tmp_path / "text.txt").write_text("abc|ab")
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"abc|ab"))
    loaded = Loaded(Guessing(), Letters())
    plain, compressed = (
        evaluate_text(TextSection(name="a", file=name, separator="|", window=2), tmp_path / name, None, loaded, 2)
        for name in ("text.txt", "text.txt.gz")
    )
    assert compressed == plain and plain.scores["a"]["n"] == 2
