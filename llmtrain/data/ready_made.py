"""Ready-made tokens: `data.source` and `data.validation` that are token files of another tool.

A run reads the files in place. The cache folder contains only the tokenizer and an index of the files, with the border
between the splits and the number of bytes of the validation text. A sample of the tokens is checked when the index is
written, and all tokens in the background of each run.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmtrain.config import DataSection
from llmtrain.data.dataset import (
    Index,
    LazyShard,
    ReadyMade,
    Shard,
    SplitIndex,
    TokenDataset,
    TokenShards,
)
from llmtrain.data.local_files import READERS, stamps, without_held_out
from llmtrain.data.sources import Position
from llmtrain.data.token_files import TokenFile, find_token_files, read_headers
from llmtrain.data.token_ids import Vocabulary
from llmtrain.data.trained_tokenizer import TRAIN
from llmtrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES, SAMPLE_TOKENS = 64, 1 << 16
"""Number and length of the windows of tokens that are checked before a run starts."""
DECODED_TOKENS = 1 << 20
"""Maximum tokens decoded at once."""
VALIDATION_NAMES = ("val", "valid", "validation")
"""Words in the names of files that hold validation tokens."""


@dataclass(frozen=True)
class ReadyMadeFiles:
    """Token files that a recipe names."""

    train: tuple[TokenFile, ...]
    validation: tuple[TokenFile, ...]
    """Files of `data.validation`; none if the last part of `train` is held out."""

    def stamps(self) -> list[tuple[str, int, int]]:
        """Return the absolute path, the size in bytes and the modification time in nanoseconds of every file."""
        return stamps(path for file in (*self.train, *self.validation) for path in file.files)


def find_ready_made(data: DataSection) -> ReadyMadeFiles | None:
    """Return the token files of `data` as their headers describe them, or None if its source is text. Raises DataError if
    the files can't be used, or if they are combined with text or with a tokenizer that is still to be trained."""
    texts = tuple(READERS)
    paths = find_token_files(data.source, "data.source", texts)
    held_out = None if data.validation is None else find_token_files(data.validation, "data.validation", texts)
    if paths is None:
        if held_out is not None:
            raise DataError(
                f"data.validation: {data.validation}: token files, but data.source={data.source} is text; give text, or the "
                "token files under eval.sets"
            )
        return None
    if data.tokenizer.startswith(TRAIN):
        raise DataError(
            f"data.tokenizer: {data.tokenizer}: data.source={data.source} is tokens already; name the tokenizer that made them"
        )
    if data.validation is not None:
        if held_out is None:
            raise DataError(
                f"data.validation: {data.validation}: not token files, but data.source is; give token files, or the text under "
                "eval.sets"
            )
        if data.validation != data.source:
            paths = without_held_out(paths, held_out, data)
    elif any(map(is_for_validation, paths)) and not all(map(is_for_validation, paths)):
        held_out = list(filter(is_for_validation, paths))
        paths = [path for path in paths if path not in held_out]
    return ReadyMadeFiles(read_headers(paths, "data.source"), read_headers(held_out or [], "data.validation"))


def is_for_validation(path: Path) -> bool:
    """Return whether a token file's name says that it has validation text."""
    words = "".join(character if character.isalpha() else " " for character in path.stem.lower()).split()
    return any(word in VALIDATION_NAMES for word in words)


def index_of(files: ReadyMadeFiles, data: DataSection, empty: Index) -> Index:
    """Return `empty`, the index of a folder without tokens, with the files' tokens added. Raises DataError if a sample
    of the tokens has one outside the tokenizer's vocabulary, or if the files can't be split."""
    groups = {"train": files.train, "validation": files.validation}
    parts = {split: _shards(group) for split, group in groups.items()}
    documents = dict.fromkeys(groups, 0)
    has_eos = {split: check_sample(group, empty) for split, group in groups.items() if group}
    if not files.validation:
        border = _border(files.train, data, empty.eos_id)
        parts = {"train": _cut(parts["train"], 0, border), "validation": _cut(parts["train"], border, None)}
    elif files.train[0].index is not None:
        documents = {
            split: sum(file.index.documents for file in group if file.index is not None)
            for split, group in groups.items()
        }
    splits = {
        split: SplitIndex(
            tokens=sum(shard.tokens for shard in shards),
            documents=documents[split],
            text_bytes=0,
            exhausted=True,
            position=Position(),
            shards=tuple(shards),
        )
        for split, shards in parts.items()
    }
    ready_made = ReadyMade(kind=files.train[0].kind, has_eos=has_eos["train"])
    return empty.model_copy(update={"splits": splits, "ready_made": ready_made})


def _shards(files: Sequence[TokenFile]) -> list[Shard]:
    return [
        Shard(name=str(file.path), tokens=file.tokens, bytes=file.bytes, offset=file.offset, dtype=file.dtype)
        for file in files
    ]


def _joined(files: Sequence[TokenFile]) -> TokenShards:
    """Return the concatenated tokens of files. A file is memory-mapped when it is read."""
    return TokenShards([LazyShard(file.path.parent, shard) for file, shard in zip(files, _shards(files), strict=True)])


def _cut(shards: Sequence[Shard], start: int, end: int | None) -> list[Shard]:
    """Return shards with the tokens [start, end) of `shards`; with None as `end`, up to the last token."""
    cut, first = [], 0
    for shard in shards:
        low, high = max(start - first, 0), shard.tokens if end is None else min(end - first, shard.tokens)
        if low < high:
            offset = (shard.offset or 0) + low * np.dtype(shard.dtype).itemsize
            cut.append(shard.model_copy(update={"tokens": high - low, "offset": offset}))
        first += shard.tokens
    return cut


def check_sample(files: Sequence[TokenFile], index: Index) -> bool:
    """Return whether eos occurs in evenly spaced windows of the files. Raises DataError if a window has a token outside
    the vocabulary, or if tokens that are read as uint16 seem to be of another type."""
    no_header = f"{files[0].path}: without a header, its tokens are read as uint16"
    if files[0].kind == "nanogpt" and index.vocab_size > 1 << 16:
        raise DataError(
            f"{no_header}, too small for the {index.vocab_size:,} tokens of data.tokenizer={index.tokenizer}; convert it to .npy, or "
            "name the tokenizer that made it"
        )
    tokens, vocabulary = _joined(files), Vocabulary(index.tokenizer, index.vocab_size)
    ends = list(itertools.accumulate(file.tokens for file in files))
    length, has_eos = min(SAMPLE_TOKENS, len(tokens)), False
    has_even, has_odd = False, len(tokens) < 2  # whether a token at an even or odd position is not 0
    for start in np.unique(np.linspace(0, len(tokens) - length, SAMPLES, dtype=np.int64)).tolist():
        ids = tokens.window(start, length)
        if (wrong := vocabulary.first_wrong(ids)) is not None:
            number = bisect.bisect_right(ends, start + wrong)
            position = start + wrong - (ends[number] - files[number].tokens)
            raise DataError(vocabulary.describe(files[number].path, position, int(ids[wrong])))
        has_eos = has_eos or bool((ids == index.eos_id).any())
        has_even = has_even or bool(ids[start % 2 :: 2].any())
        has_odd = has_odd or bool(ids[1 - start % 2 :: 2].any())
    if files[0].kind == "nanogpt" and has_even and not has_odd:
        raise DataError(
            f"{no_header}, but every second one is 0, as if they were uint32; convert it to .npy, or to uint16"
        )
    return has_eos


def _border(files: Sequence[TokenFile], data: DataSection, eos: int) -> int:
    """Return the position of the first validation token. A document begins there, and about `data.validation_fraction` of the
    tokens are at or after it."""
    total = sum(file.tokens for file in files)
    target = min(max(round(total * (1 - data.validation_fraction)), 1), total - 1)
    if files[0].index is None:
        border = _border_at_eos(_joined(files), target, eos)
        what = "no eos token"
    else:
        border = _border_of_index(files, target)
        what = "no document border"
    if border is None or not 0 < border < total:
        raise DataError(
            f"data.source: {data.source}: {what} where validation documents could begin; give data.validation, or change "
            f"data.validation_fraction (now {data.validation_fraction:g})"
        )
    return border


def _border_of_index(files: Sequence[TokenFile], target: int) -> int:
    first = border = 0
    for file in files:
        assert file.index is not None, file
        border = first + file.index.border_near(max(target - first, 0))
        if border >= target:
            break
        first += file.tokens
    return border


def _border_at_eos(tokens: TokenShards, target: int, eos: int) -> int | None:
    """Return the position after the first eos at `target` - 1 or later, except for an eos that is the last token. If there is
    none, return the position after the last eos before `target` - 1, or None."""
    for start in range(max(target - 1, 0), len(tokens) - 1, DECODED_TOKENS):
        found = np.flatnonzero(tokens.window(start, min(DECODED_TOKENS, len(tokens) - 1 - start)) == eos)
        if len(found):
            return start + int(found[0]) + 1
    for end in range(target - 1, 0, -DECODED_TOKENS):
        start = max(end - DECODED_TOKENS, 0)
        found = np.flatnonzero(tokens.window(start, end - start) == eos)
        if len(found):
            return start + int(found[-1]) + 1
    return None


def is_measured(prepared: TokenDataset) -> bool:
    """Return whether the number of text bytes of the validation tokens that the recipe asks for is known or not needed."""
    ready_made = prepared.index.ready_made
    return ready_made is None or len(prepared.tokens("validation")) in ready_made.validation_bytes


def measured(prepared: TokenDataset) -> Index:
    """Decode the validation tokens that the recipe asks for, and return the index with their number of text bytes.
    Raises DataError if they contain no text."""
    tokens, index = prepared.tokens("validation"), prepared.index
    assert index.ready_made is not None
    count = count_text_bytes(tokens, prepared)
    if not count:
        raise DataError(
            f"data.validation: the {len(tokens):,} validation tokens contain no text; give other token files"
        )
    known = {**index.ready_made.validation_bytes, len(tokens): count}
    return index.model_copy(update={"ready_made": index.ready_made.model_copy(update={"validation_bytes": known})})


def count_text_bytes(tokens: TokenShards, prepared: TokenDataset) -> int:
    """Return the number of UTF-8 bytes of the text that the tokens encode, without special tokens. A character that the
    end of the tokens cuts off does not count."""
    tokenizer, count = prepared.load_tokenizer(), 0
    documents: list[list[int]] = []
    gathered = 0
    for document in _documents(tokens, prepared):
        if gathered >= DECODED_TOKENS:
            count += sum(len(text.encode()) for text in _decoded(tokenizer, documents))
            documents, gathered = [], 0
        documents.append(document)
        gathered += len(document)
    *ended, last = documents  # the last one is empty if the tokens end with eos
    for cut in range(4):  # a cut-off character has at most three bytes, each of which may be a token
        text = _decoded(tokenizer, [last[: len(last) - cut]])[0]
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            break
    return count + sum(len(text.encode()) for text in [*_decoded(tokenizer, ended), text])


def _decoded(tokenizer: PreTrainedTokenizerBase, documents: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(documents, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _documents(tokens: TokenShards, prepared: TokenDataset) -> Iterator[list[int]]:
    """Yield the tokens of each document without eos. Documents of more than DECODED_TOKENS are yielded in parts."""
    document: list[int] = []
    for start in range(0, len(tokens), DECODED_TOKENS):
        ids = tokens.window(start, min(DECODED_TOKENS, len(tokens) - start))
        if (wrong := prepared.vocabulary.first_wrong(ids)) is not None:
            raise DataError(prepared.vocabulary.describe("data.validation", start + wrong, int(ids[wrong])))
        for number, part in enumerate(np.split(ids, np.flatnonzero(ids == prepared.eos_id))):
            # all parts but the first of this window begin with the eos token that ends the previous document
            if number:
                yield document
                document = []
            document += part[min(number, 1) :].tolist()
        if len(document) >= DECODED_TOKENS:
            yield document
            document = []
    yield document


def describe_files(prepared: TokenDataset) -> list[str]:
    """Return lines that tell the user which token files are in use, and whether their documents are separated."""
    index = prepared.index
    assert index.ready_made is not None
    files = dict.fromkeys(shard.name for split in index.splits.values() for shard in split.shards)
    what = "file" if len(files) == 1 else "files"
    lines = [
        f"reading {len(files)} {index.ready_made.kind} {what} in place: {index.source}, tokens of {index.tokenizer}; nothing is copied"
    ]
    if not index.ready_made.has_eos:
        lines.append(
            f"note: {no_separators(prepared)}: a sequence runs from one document into the next without a separator"
        )
    return lines


def no_separators(prepared: TokenDataset) -> str:
    """Return the line that says that documents are not separated."""
    eos = prepared.load_tokenizer().eos_token
    return (
        f"{prepared.index.source}: documents are not separated: the eos token {eos} ({prepared.eos_id}) of "
        f"data.tokenizer={prepared.index.tokenizer} does not occur"
    )


def check_separators(prepared: TokenDataset, key: str) -> None:
    """Raise DataError if these are ready-made tokens without eos. `key` is the recipe key that needs eos."""
    if prepared.index.ready_made is not None and not prepared.index.ready_made.has_eos:
        raise DataError(
            f"{key}: {no_separators(prepared)}; name the tokenizer that made the tokens (Megatron: preprocess with "
            "--append-eod), or leave out this key"
        )
