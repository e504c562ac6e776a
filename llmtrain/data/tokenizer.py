"""Tokenizers loaded by name, folder or file, or trained on the source as a sentencepiece BPE, always with an eos
token."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config import DataSection
from llmtrain.data.sources import documents, require
from llmtrain.errors import DataError, first_line, reason
from llmtrain.files import local_path
from llmtrain.waiting import announced

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

TRAIN = "train:"
INSTEAD_OF_HUB = "a folder that has its tokenizer.json, or train:SIZE"
EOS = "<|endoftext|>"
KNOWN_EOS = (EOS, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the special token that ends a text, tried in order if a local tokenizer does not name its own."""
SAMPLE_BYTES = 10_000_000
"""Maximum bytes of text that a tokenizer is trained on."""
SAMPLE_FROM_BYTES = 20 * SAMPLE_BYTES
"""Bytes at the start of the source from which the sample is taken, so that a huge source is not read completely."""


def load_tokenizer(data: DataSection, cache: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer saved in folder `cache`. If there is none, first save there the one that
    `data.tokenizer` names. Raises DataError if that one has no eos token."""
    from transformers import AutoTokenizer

    if not (cache / "tokenizer_config.json").exists():
        tokenizer = _new_tokenizer(data)
        _check_eos(tokenizer, data)
        tokenizer.save_pretrained(cache)
    try:
        return AutoTokenizer.from_pretrained(cache)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise DataError(
            f"data.tokenizer: {data.tokenizer}: its copy {cache} can't be read ({reason(error)}); copy the tokenizer again, and "
            "delete that folder"
        ) from None


def tokenizer_files(name: str) -> list[Path]:
    """Return the files of a local tokenizer, or an empty list for a hub name or `train:SIZE`."""
    path = local_path(name)
    if path is not None and path.is_dir():
        return sorted(file for pattern in ("*token*", "vocab*", "merges*", "*.model") for file in path.glob(pattern))
    return [path] if path is not None and path.is_file() else []


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id plus one, including added tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def trained_size(name: str) -> int | None:
    """Return SIZE of `train:SIZE`, or None for the name of a tokenizer that exists. Raises DataError if SIZE is not a
    positive whole number."""
    if not name.startswith(TRAIN):
        return None
    size = name.removeprefix(TRAIN)
    if not size.isdecimal() or int(size) == 0:
        raise DataError(f"data.tokenizer: {name}: expected train:SIZE with a whole number, like train:4096")
    return int(size)


def check_tokenizer_exists(data: DataSection) -> None:
    """Raise DataError if `load_tokenizer` could not provide `data.tokenizer`. Trains and downloads nothing."""
    if (tokenizer := existing_tokenizer(data)) is not None:
        _check_eos(tokenizer, data)
    elif trained_size(data.tokenizer) is None:
        require(data.tokenizer, "model", key="data.tokenizer", instead=INSTEAD_OF_HUB)


def existing_tokenizer(data: DataSection) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that `data.tokenizer` names if it is on this machine, or None if it has to be trained or
    downloaded. Raises DataError for a local one that can't be read."""
    if trained_size(data.tokenizer) is not None:
        return None
    path = local_path(data.tokenizer)
    return _downloaded(data.tokenizer) if path is None else _load_local(path)


def _check_eos(tokenizer: PreTrainedTokenizerBase, data: DataSection) -> None:
    if tokenizer.eos_token_id is None:
        raise DataError(f"data.tokenizer: {data.tokenizer} has no eos token; it has to separate documents")


def _new_tokenizer(data: DataSection) -> PreTrainedTokenizerBase:
    name, size = data.tokenizer, trained_size(data.tokenizer)
    if size is not None:
        return train_tokenizer(documents(data, "train"), size)
    path = local_path(name)
    return _load_hub(name) if path is None else _load_local(path)


def _load_local(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_dir() and not tokenizer_files(str(path)):
        raise DataError(f"data.tokenizer: {path}: a folder without a tokenizer.json; give that of a tokenizer")
    try:
        is_file = path.is_file()
        tokenizer = (
            PreTrainedTokenizerFast(tokenizer_file=str(path)) if is_file else AutoTokenizer.from_pretrained(path)
        )
    except Exception as error:
        raise DataError(
            f"data.tokenizer: {path}: not a tokenizer ({reason(error)}); expected a tokenizer.json or its folder"
        ) from None
    if tokenizer.eos_token is None:
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokenizer.eos_token = next((token for token in KNOWN_EOS if token in special), None)
    return tokenizer


def _downloaded(name: str) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer of the hub that an earlier download left on this machine, or None. Needs no network."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None


def _load_hub(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if (tokenizer := _downloaded(name)) is not None:
        return tokenizer
    require(name, "model", key="data.tokenizer", instead=INSTEAD_OF_HUB)
    try:
        with announced(f"the Hugging Face hub to send the tokenizer {name}"):
            return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {name}: {first_line(error)}") from None


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerBase:
    """Train a sentencepiece BPE of `size` pieces; return it as a fast tokenizer that reproduces any text exactly.

    Nothing is normalized: whitespace is kept, and characters without a piece are encoded as bytes.
    """
    import sentencepiece

    model, sampled = io.BytesIO(), sample(texts)
    if not any(map(str.strip, sampled)):
        raise DataError(f"data.tokenizer: {TRAIN}{size}: the source has no text to train a tokenizer on; give it some")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_chunks(sampled),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=EOS,
            max_sentence_length=1 << 20,
            num_threads=2,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"data.tokenizer: {TRAIN}{size}: {_reason(first_line(error))}") from None
    return fast_tokenizer(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()))


def _reason(message: str) -> str:
    """Return sentencepiece's reason not to train a tokenizer, with the size to give instead if it names one."""
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"this source has more characters than that; give at least {TRAIN}{least[1]}"
    if most := re.search(r"Vocabulary size too high.* value <= (\d+)", message):
        return f"this source has too little text for so many pieces; give at most {TRAIN}{most[1]}"
    return (
        f"can't be trained on this source: {message.rpartition('] ')[2]}"  # after the place in sentencepiece's source
    )


def fast_tokenizer(pieces: SentencePieceProcessor) -> PreTrainedTokenizerBase:
    """Return the BPE `pieces` as a fast tokenizer without sentencepiece's escape character for spaces, so that text
    that contains this character is also reproduced exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = range(pieces.get_piece_size())
    vocab = {pieces.id_to_piece(i).replace("\u2581", " "): i for i in ids}
    special = [piece for piece, i in vocab.items() if pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i)]
    ordinary = vocab.keys() - set(special)
    # sentencepiece merges the pair whose union has the best score, and ids are in the order of scores
    merges = [
        (piece[:cut], piece[cut:])
        for piece in vocab
        if piece in ordinary
        for cut in range(1, len(piece))
        if piece[:cut] in ordinary and piece[cut:] in ordinary
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    # No piece continues past a word with a space, so splitting there first is faster and changes nothing
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" *[^ ]+| +"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token=EOS, clean_up_tokenization_spaces=False
    )


def sample(texts: Iterable[str]) -> list[str]:
    """Return about SAMPLE_BYTES / 2 to SAMPLE_BYTES of complete documents, spread evenly over the first SAMPLE_FROM_BYTES.

    Every stride-th document is kept. Whenever these exceed SAMPLE_BYTES, every other one is dropped and the stride
    doubles.
    """
    kept: list[str] = []
    stride, kept_bytes, seen_bytes = 1, 0, 0
    for number, text in enumerate(texts):
        seen_bytes += len(text.encode())
        if number % stride == 0:
            kept.append(text)
            kept_bytes += len(text.encode())
        while kept_bytes > SAMPLE_BYTES and len(kept) > 1:
            kept, stride = kept[::2], stride * 2
            kept_bytes = sum(len(text.encode()) for text in kept)
        if seen_bytes >= SAMPLE_FROM_BYTES:
            break
    return kept


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    """Yield parts of at most 4,000 characters, because sentencepiece's BPE cannot hold a longer word and not every
    script has spaces."""
    for text in texts:
        for start in range(0, len(text), 4000):
            yield text[start : start + 4000]
