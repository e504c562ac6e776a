"""Tokenizers loaded by name, folder or file, or trained on the source as a sentencepiece BPE, always with an eos
token."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config import DataSection
from llmtrain.data.sources import documents, first_line, require
from llmtrain.errors import DataError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerBase

TRAIN = "train:"
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
        if tokenizer.eos_token_id is None:
            raise DataError(f"data.tokenizer: {data.tokenizer} has no eos token; it has to separate documents")
        tokenizer.save_pretrained(cache)
    return AutoTokenizer.from_pretrained(cache)


def tokenizer_files(name: str) -> list[Path]:
    """Return the files of a local tokenizer, or an empty list for a hub name or `train:SIZE`."""
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(file for pattern in ("*token*", "vocab*", "merges*", "*.model") for file in path.glob(pattern))
    return [path] if path.is_file() else []


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id plus one, including added tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def _new_tokenizer(data: DataSection) -> PreTrainedTokenizerBase:
    name = data.tokenizer
    if name.startswith(TRAIN):
        size = name.removeprefix(TRAIN)
        if not size.isdecimal():
            raise DataError(f"data.tokenizer: {name}: expected train:SIZE with a whole number, like train:4096")
        return train_tokenizer(documents(data, "train"), int(size))
    path = Path(name).expanduser()
    return _load_local(path) if path.exists() else _load_hub(name)


def _load_local(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        is_file = path.is_file()
        tokenizer = (
            PreTrainedTokenizerFast(tokenizer_file=str(path)) if is_file else AutoTokenizer.from_pretrained(path)
        )
    except Exception as error:
        raise DataError(
            f"data.tokenizer: {path}: not a tokenizer ({first_line(error)}); expected a tokenizer.json or its folder"
        ) from None
    if tokenizer.eos_token is None:
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokenizer.eos_token = next((token for token in KNOWN_EOS if token in special), None)
    return tokenizer


def _load_hub(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)  # already downloaded: needs no network
    except (OSError, ValueError):
        require(name, "model", key="data.tokenizer", instead="a folder that has its tokenizer.json, or train:SIZE")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {name}: {first_line(error)}") from None


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerBase:
    """Train a sentencepiece BPE of `size` pieces; return it as a fast tokenizer that reproduces any text exactly.

    Nothing is normalized: whitespace is kept, and characters without a piece are encoded as bytes.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_chunks(sample(texts)),
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
        reason = first_line(error).rpartition("] ")[2]  # after sentencepiece's source location and failed condition
        raise DataError(f"data.tokenizer: {TRAIN}{size}: can't be trained on this source: {reason}") from None
    return fast_tokenizer(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()))


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


def sample(texts: Iterable[str], size: int = SAMPLE_BYTES, of: int = SAMPLE_FROM_BYTES) -> list[str]:
    """Return about size/2 to size bytes of complete documents, spread evenly over the first `of` bytes.

    Every stride-th document is kept. Whenever these exceed `size`, every other one is dropped and the stride
    doubles.
    """
    kept: list[str] = []
    stride, kept_bytes, seen_bytes = 1, 0, 0
    for number, text in enumerate(texts):
        seen_bytes += len(text.encode())
        if number % stride == 0:
            kept.append(text)
            kept_bytes += len(text.encode())
        while kept_bytes > size and len(kept) > 1:
            kept, stride = kept[::2], stride * 2
            kept_bytes = sum(len(text.encode()) for text in kept)
        if seen_bytes >= of:
            break
    return kept


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    """Yield parts of at most 4,000 characters, because sentencepiece's BPE cannot hold a longer word and not every
    script has spaces."""
    for text in texts:
        for start in range(0, len(text), 4000):
            yield text[start : start + 4000]
