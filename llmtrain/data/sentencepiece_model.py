"""SentencePiece models as fast tokenizers that give the same ids.

BPE models such as Llama's give exactly sentencepiece's ids. Unigram models do so, too, unless two segmentations of a word
have equal probabilities (measured: in 2 or 3 of 630 texts).
transformers' own conversions of a bare tokenizer.model give other ids for text that begins with a space, or lack the space
that sentencepiece puts before a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerBase

MODEL_FILE = "tokenizer.model"
SPACE = "\u2581"
"""Character that stands for a space in the pieces."""
UNIGRAM, BPE = 1, 2
"""Values of `model_type` in a model's trainer_spec that can be converted."""
PROBES = (
    "A text, with words.\n\n  Two lines\tand a tab  ", "   leading", "1234 5.67", "\u65e5\u672c\u8a9e \u00fc", "\U0001f642\u200d\U0001f642",
    "e\u0301 \ufb01", "\0\x01\r\n", "<s></s><unk><0x41>", " ", "x = {'a': 3}  # y", "\u2581",
)  # fmt: skip
"""Texts that a converted tokenizer must encode as sentencepiece does."""


def load_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    """Return the SentencePiece model at `path` as a fast tokenizer. Raises DataError if the file is not such a model,
    or if the model can't be converted exactly."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    from transformers import PreTrainedTokenizerFast

    wrong_kind = (
        f"data.tokenizer: {path}: not a SentencePiece model, or damaged; copy it again, or give a tokenizer.json"
    )
    try:
        raw = path.read_bytes()
        pieces = SentencePieceProcessor(model_proto=raw)
        model = sentencepiece_model_pb2.ModelProto.FromString(raw)
    except OSError as error:
        raise DataError(f"data.tokenizer: {path}: can't be read ({error.strerror}); copy it again") from None
    except Exception:  # protobuf and sentencepiece raise errors of several kinds
        raise DataError(wrong_kind) from None
    if not model.pieces:
        raise DataError(wrong_kind)
    if model.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise DataError(
            f"data.tokenizer: {path}: a SentencePiece model of words or characters; expected BPE or unigram"
        )
    converted = convert(model)
    converted.encode_special_tokens = True
    wrong = [text for text in PROBES if converted.encode(text, add_special_tokens=False).ids != pieces.encode(text)]
    if wrong:
        raise DataError(
            f"data.tokenizer: {path}: this SentencePiece model can't be converted exactly (it encodes {wrong[0]!r} "
            "otherwise); give the tokenizer.json of its publisher"
        )
    names = {"unk": pieces.unk_id(), "bos": pieces.bos_id(), "eos": pieces.eos_id(), "pad": pieces.pad_id()}
    return PreTrainedTokenizerFast(
        tokenizer_object=converted,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": pieces.id_to_piece(number) for name, number in names.items() if number >= 0},
    )


def adds_space(path: Path) -> bool:
    """Return whether the SentencePiece model at `path` puts a space before a text. Raises DataError if it is damaged."""
    from sentencepiece import sentencepiece_model_pb2

    try:
        return sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes()).normalizer_spec.add_dummy_prefix
    except Exception:  # of protobuf
        raise DataError(f"{path}: not a SentencePiece model, or damaged; copy it again") from None


def convert(model: Any) -> Tokenizer:
    """Return the tokenizer of a parsed ModelProto."""
    from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

    kinds = type(model.pieces[0])
    special = [p.piece for p in model.pieces if p.type in (kinds.CONTROL, kinds.UNKNOWN, kinds.BYTE)]
    is_bpe = model.trainer_spec.model_type == BPE
    tokenizer = Tokenizer(_bpe(model) if is_bpe else _unigram(model))
    tokenizer.normalizer = _normalizer(model)
    if not is_bpe:
        tokenizer.pre_tokenizer = hiding(special)  # sentencepiece never finds a special piece in a text
    elif not any(re.search(f"[^{SPACE}]{SPACE}", piece.piece) for piece in model.pieces):
        # no piece has a space after another character, so splitting a text before its spaces first gives the same ids, faster
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}*[^{SPACE}]+|{SPACE}+"), behavior="isolated")
    tokenizer.decoder = _decoder(model)
    user_defined = [p.piece for p in model.pieces if p.type == kinds.USER_DEFINED]
    control = [p.piece for p in model.pieces if p.type == kinds.CONTROL]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in user_defined])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    return tokenizer


def hiding(pieces: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits a text after the first character of each occurrence of `pieces`, so that a
    model finds none of them. Pieces of one character are not split."""
    from tokenizers import Regex, pre_tokenizers

    rest = "|".join(re.escape(piece[1:]) for piece in pieces if len(piece) > 1)
    first = "".join(sorted({re.escape(piece[0]) for piece in pieces if len(piece) > 1}))
    return pre_tokenizers.Split(Regex(f"[{first}](?={rest})"), behavior="merged_with_previous")


def _bpe(model: Any) -> models.BPE:
    from tokenizers import models

    kinds = type(model.pieces[0])
    score = {p.piece: p.score for p in model.pieces if p.type == kinds.NORMAL}
    return models.BPE(
        vocab={p.piece: number for number, p in enumerate(model.pieces)},
        merges=merges_of(sorted(score, key=lambda piece: -score[piece])),
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def merges_of(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model with these ordinary `pieces`, from the best score to the worst. sentencepiece merges the
    pair whose union has the best score."""
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


def _unigram(model: Any) -> models.Unigram:
    from tokenizers import models

    spec = model.trainer_spec
    return models.Unigram([(p.piece, p.score) for p in model.pieces], spec.unk_id, spec.byte_fallback)


def _normalizer(model: Any) -> normalizers.Normalizer:
    from tokenizers import Regex, normalizers

    spec, steps = model.normalizer_spec, []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: Any) -> Any:
    from tokenizers import decoders

    steps = [decoders.Replace(SPACE, " ")]
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)
