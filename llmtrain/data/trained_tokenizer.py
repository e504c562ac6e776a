"""Tokenizers trained on a sample of the source: a sentencepiece BPE like Llama's, as a fast tokenizer.

The model that sentencepiece trained is kept as `tokenizer.model`, for other tools. It encodes a text as the fast tokenizer
does, with one exception: sentencepiece reads U+2581, its escape character for spaces, as a space.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from llmtrain.data.sentencepiece_model import merges_of
from llmtrain.errors import DataError, first_line
from llmtrain.waiting import announced

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

TRAIN = "train:"
EOS = "<|endoftext|>"
SPREAD = 20
"""Maximum bytes that are read from the source, per byte of the sample. The limit keeps a huge source from being read completely."""


@dataclass(frozen=True)
class TrainedOn:
    """Text on which a tokenizer was trained, as recorded in the tokenizer's folder."""

    source: str
    pieces: int
    documents: int
    bytes: int
    digest: str
    """First 16 digits of the sample's SHA-256."""

    def as_json(self) -> dict[str, str | int]:
        return asdict(self)


@dataclass(frozen=True)
class TrainedTokenizer:
    """Tokenizer that was just trained, as a fast tokenizer and as a sentencepiece model."""

    tokenizer: PreTrainedTokenizerBase
    model: bytes
    """Content of `tokenizer.model`."""
    trained_on: TrainedOn


def train_tokenizer(texts: Iterable[str], size: int, sample_bytes: int, source: str) -> TrainedTokenizer:
    """Train a sentencepiece BPE of `size` pieces on a sample of the texts of `source`. It reproduces any text exactly.

    Nothing is normalized: whitespace is kept, and characters without a piece are encoded as bytes. Raises DataError if
    there is no text, too little text for `size` pieces, or more characters than pieces.
    """
    import sentencepiece

    model, sampled = io.BytesIO(), sample(texts, sample_bytes)
    if not any(map(str.strip, sampled)):
        raise DataError(f"data.tokenizer: {TRAIN}{size}: the source has no text to train a tokenizer on; give it some")
    trained_on = _describe(sampled, size, source)
    text = f"{trained_on.bytes / 1e6:.1f} MB of {source} ({trained_on.documents:,} documents)"
    try:
        with announced(f"sentencepiece to train a tokenizer of {size:,} pieces on {text}"):
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
    fast = fast_tokenizer(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()))
    return TrainedTokenizer(fast, model.getvalue(), trained_on)


def _describe(sampled: list[str], size: int, source: str) -> TrainedOn:
    digest, count = hashlib.sha256(), 0
    for text in sampled:
        raw = text.encode()
        digest.update(raw + b"\0")
        count += len(raw)
    return TrainedOn(source, size, len(sampled), count, digest.hexdigest()[:16])


def _reason(message: str) -> str:
    """Return the reason why sentencepiece trained no tokenizer, with the size to give instead if `message` names one."""
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"this source has more characters than that; give at least {TRAIN}{least[1]}"
    if most := re.search(r"Vocabulary size too high.* value <= (\d+)", message):
        return f"this source has too little text for so many pieces; give at most {TRAIN}{most[1]}"
    _, _, cause = message.rpartition("] ")  # the part before it is the place in sentencepiece's source
    return f"can't be trained on this source: {cause}"


def fast_tokenizer(pieces: SentencePieceProcessor) -> PreTrainedTokenizerBase:
    """Return the BPE model `pieces` as a fast tokenizer that does not use sentencepiece's escape character for spaces, so
    that text with this character is also reproduced exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = range(pieces.get_piece_size())
    vocab = {pieces.id_to_piece(i).replace("\u2581", " "): i for i in ids}
    special = {i for i in ids if pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i)}
    merges = merges_of([piece for piece, i in vocab.items() if i not in special])  # ids are in the order of scores
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    # No piece has a space after another character, so splitting a text before its spaces first gives the same ids, faster.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" *[^ ]+| +"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token=EOS, clean_up_tokenization_spaces=False
    )


def sample(texts: Iterable[str], sample_bytes: int) -> list[str]:
    """Return about `sample_bytes` / 2 to `sample_bytes` of complete documents, spread evenly over the first SPREAD x
    `sample_bytes` of the texts.

    Every stride-th document is kept. Whenever these exceed `sample_bytes`, every other one is dropped and the stride
    doubles.
    """
    kept: list[str] = []
    stride, kept_bytes, seen_bytes = 1, 0, 0
    for number, text in enumerate(texts):
        seen_bytes += len(text.encode())
        if number % stride == 0:
            kept.append(text)
            kept_bytes += len(text.encode())
        while kept_bytes > sample_bytes and len(kept) > 1:
            kept, stride = kept[::2], stride * 2
            kept_bytes = sum(len(text.encode()) for text in kept)
        if seen_bytes >= SPREAD * sample_bytes:
            break
    return kept


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    """Yield parts of at most 4,000 characters, because sentencepiece's BPE cannot hold a longer word and not every
    script has spaces."""
    for text in texts:
        for start in range(0, len(text), 4000):
            yield text[start : start + 4000]
