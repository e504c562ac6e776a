"""Token files that other tools wrote, recognized and checked by their headers. Their tokens are never copied.

nanoGPT     `.bin`: uint16 tokens and nothing else
llm.c       `.bin`: a header of 256 int32, which begins with a magic number, a version and the number of tokens; then
            uint16 or uint32 tokens (modded-nanogpt has the same format)
Megatron    `.bin` with tokens, and `.idx` with their dtype and the lengths of sequences and documents
npy         `.npy`: one-dimensional NumPy array

All numbers are little-endian.
"""

from __future__ import annotations

import codecs
import glob
import os
import struct
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from llmtrain.errors import DataError, data_error, one_line
from llmtrain.files import local_path, visible_files

Kind = Literal["nanogpt", "llm.c", "megatron", "npy"]
ENDINGS = (".bin", ".npy", ".idx")
HEADER_INTS = 256
LLM_C_KINDS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""(Version, dtype) by magic number: for vocabularies of up to 65,536 tokens, and for larger ones."""
LLM_C_EVALUATION = 20240522
"""Magic number of llm.c's files with questions and answers."""
NPY_DTYPES = ("<u2", "<u4", "<i4", "<i8")
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Dtype by code. The codes 6 and 7 are floating-point numbers."""
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, and number of document borders: documents + 1."""
TEXT_BYTES = 4096
"""Number of bytes at the start of a `.bin` that are checked for text. That many bytes of tokens never look like text."""
CHUNK = 1 << 20


@dataclass(frozen=True)
class TokenFile:
    """Token file, as its header describes it."""

    path: Path
    """Absolute path."""
    kind: Kind
    dtype: str
    offset: int
    """Bytes before the first token."""
    tokens: int
    bytes: int
    """Size of the file."""
    index: DocumentIndex | None = None
    """Documents, if the file has an index of them."""

    @property
    def files(self) -> list[Path]:
        """Return the paths of the file and of its index."""
        return [self.path] if self.index is None else [self.path, self.index.path]


@dataclass(frozen=True)
class DocumentIndex:
    """Index of a Megatron dataset: sequences, and the documents that they form."""

    path: Path
    itemsize: int
    """Bytes per token in the `.bin`."""
    sequences: int
    borders: int
    """Number of document borders: documents + 1."""

    @property
    def documents(self) -> int:
        return max(self.borders - 1, 0)

    def sizes(self) -> np.ndarray:
        """Return the number of tokens of each sequence, memory-mapped: int32 [sequences]."""
        return np.memmap(self.path, "<i4", "r", MEGATRON_HEADER.size, (self.sequences,))

    def pointers(self) -> np.ndarray:
        """Return the byte of the `.bin` at which each sequence begins, memory-mapped: int64 [sequences]."""
        return np.memmap(self.path, "<i8", "r", MEGATRON_HEADER.size + 4 * self.sequences, (self.sequences,))

    def first_sequences(self) -> np.ndarray:
        """Return the first sequence of each document, followed by the number of sequences, memory-mapped: int64 [borders]."""
        return np.memmap(self.path, "<i8", "r", MEGATRON_HEADER.size + 12 * self.sequences, (self.borders,))

    def border_near(self, token: int) -> int:
        """Return the position of the first token of the first document that begins at `token` or later. If no document does,
        return that of the last document that is not empty."""
        first, pointers = self.first_sequences(), self.pointers()
        low, high = 0, int(np.searchsorted(first, self.sequences))
        documents = high
        while low < high:
            middle = (low + high) // 2
            if pointers[first[middle]] // self.itemsize < token:
                low = middle + 1
            else:
                high = middle
        return int(pointers[first[min(low, documents - 1)]]) // self.itemsize


def find_token_files(source: str, key: str, text_endings: tuple[str, ...]) -> list[Path] | None:
    """Return the token files that `source` names, sorted, or None if it names none.

    `source` is a file, the common part of the names of a `.bin` and its `.idx`, a folder, or a pattern such as
    `tokens/*.bin`. A folder that also has files with `text_endings` is a folder of text. Raises DataError if a pattern
    matches nothing.
    """
    path = local_path(source)
    if path is None and source.lower().endswith(ENDINGS) and any(mark in source for mark in "*?["):
        found = sorted(Path(name) for name in glob.glob(os.path.expanduser(source), recursive=True))
        if not found:
            raise DataError(f"{key}: {source}: no file matches this pattern; give the token files' path")
        return _without_indexes(found)
    if path is None:
        pair = [Path(os.path.expanduser(f"{source}{ending}")) for ending in (".bin", ".idx")]
        return pair[:1] if all(os.path.isfile(file) for file in pair) else None
    if os.path.isfile(path):
        return _without_indexes([path]) if path.name.lower().endswith(ENDINGS) else None
    try:
        visible = visible_files(path)
    except OSError:  # the reader of text will report it
        return None
    found = [file for file in visible if file.name.lower().endswith(ENDINGS)]
    has_text = any(file.name.lower().endswith(text_endings) for file in visible)
    return None if has_text or not found else _without_indexes(found)


def _without_indexes(paths: Sequence[Path]) -> list[Path]:
    """Return the paths with each `.idx` replaced by its `.bin`, which stands for the dataset, and without duplicates."""
    return list(dict.fromkeys(path.with_suffix(".bin") if path.suffix.lower() == ".idx" else path for path in paths))


def read_headers(paths: Sequence[Path], key: str) -> tuple[TokenFile, ...]:
    """Return the token files at `paths`, as their headers describe them. Raises DataError, whose message begins with `key`,
    for a file without tokens, and for files of different kinds."""
    files = []
    for path in paths:
        try:
            files.append(read_header(path))
        except OSError as error:
            raise data_error(f"{key}: {path}: can't be read ({error.strerror}); copy it again", error) from None
        except DataError as error:
            raise DataError(f"{key}: {error}") from None
    for file in files[1:]:
        if file.kind != files[0].kind:
            raise DataError(
                f"{key}: {files[0].path.name} is of the kind {files[0].kind} and {file.path.name} of the kind {file.kind}; "
                "give files of one kind"
            )
    return tuple(files)


def read_header(path: Path) -> TokenFile:
    """Return the token file at `path`, as its header describes it. Raises DataError if the file is not a valid token file, and
    OSError if it can't be read."""
    path = path.absolute()
    if path.suffix.lower() == ".npy":
        return _read_npy(path)
    index = path.with_suffix(".idx")
    if os.path.isfile(index):  # False also for a name that is too long
        return _read_megatron(path, index)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(4 * HEADER_INTS, TEXT_BYTES))
    if not size:
        raise DataError(f"{path}: an empty file; expected tokens")
    _check_no_index(path, start)
    _check_no_text(path, start)
    if (header := _llm_c_header(path, start, size)) is not None:
        return header
    if size % 2:
        raise DataError(f"{path}: {size:,} bytes, an odd number; uint16 tokens take 2 bytes each; copy it again")
    return TokenFile(path, "nanogpt", "<u2", 0, size // 2, size)


def _read_npy(path: Path) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r")
        dtype, shape, offset = array.dtype.str, array.shape, array.offset
    except (ValueError, EOFError, SyntaxError, AttributeError, tokenize.TokenError) as error:
        # np.load parses the header as Python, and opens a zip file of any name as an archive, which has no dtype
        raise DataError(f"{path}: not an .npy file ({one_line(error)}); copy it again") from None
    if len(shape) != 1 or dtype not in NPY_DTYPES:
        raise DataError(
            f"{path}: an array of {array.dtype.name} with {len(shape)} dimensions; expected one dimension of uint16, uint32, "
            "int32 or int64"
        )
    if not shape[0]:
        raise DataError(f"{path}: an array without elements; expected tokens")
    return TokenFile(path, "npy", dtype, offset, shape[0], path.stat().st_size)


def _llm_c_header(path: Path, start: bytes, size: int) -> TokenFile | None:
    """Return the token file if `start`, its first bytes, begins with a header of llm.c; None if it has no header."""
    if len(start) < 4 * HEADER_INTS:
        return None
    magic, version, tokens, *rest = np.frombuffer(start, "<i4", HEADER_INTS).tolist()
    if magic == LLM_C_EVALUATION:
        raise DataError(f"{path}: llm.c's questions and answers (magic {magic}); expected tokens of text")
    if magic not in LLM_C_KINDS:
        if any(rest):
            return None
        expected = " or ".join(map(str, LLM_C_KINDS))
        raise DataError(f"{path}: a header with the magic number {magic}; expected {expected} (llm.c), or no header")
    expected_version, dtype = LLM_C_KINDS[magic]
    if version != expected_version:
        raise DataError(f"{path}: llm.c's version {version} (magic {magic}); expected version {expected_version}")
    expected = 4 * HEADER_INTS + tokens * np.dtype(dtype).itemsize
    if tokens <= 0 or size != expected:
        raise DataError(
            f"{path}: {size:,} bytes found, {expected:,} expected for the {tokens:,} tokens in its header; copy it again"
        )
    return TokenFile(path, "llm.c", dtype, 4 * HEADER_INTS, tokens, size)


def _check_no_index(path: Path, start: bytes) -> None:
    if start.startswith(MEGATRON_MAGIC):
        raise DataError(f"{path}: Megatron's index; expected its .bin, with the .idx under the same name")


def _check_no_text(path: Path, start: bytes) -> None:
    """Raise DataError if a file begins like text: valid UTF-8 without control characters."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start[:TEXT_BYTES])
    except UnicodeDecodeError:
        return
    if len(text) >= 2 and all(character.isprintable() or character.isspace() for character in text):
        raise DataError(f"{path}: text, expected tokens; give it a name that ends in .txt")


def _read_megatron(path: Path, index: Path) -> TokenFile:
    size, index_size = path.stat().st_size, index.stat().st_size
    remedy = f"copy {index.name} and {path.name} again, both from one dataset"
    with index.open("rb") as file:
        header = file.read(MEGATRON_HEADER.size)
    if not header.startswith(MEGATRON_MAGIC):
        raise DataError(f"{index}: not an index of Megatron, which begins with MMIDIDX; {remedy}")
    if len(header) < MEGATRON_HEADER.size:
        raise DataError(f"{index}: truncated, {index_size} bytes found; {remedy}")
    _, version, code, sequences, borders = MEGATRON_HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{index}: Megatron's version {version}; expected version 1")
    if code not in MEGATRON_DTYPES:
        raise DataError(f"{index}: dtype code {code}, which is not an integer type; expected an integer type")
    expected = MEGATRON_HEADER.size + 12 * sequences + 8 * borders
    # datasets of text and images have one more byte per sequence, for its mode
    if index_size not in (expected, expected + sequences):
        raise DataError(
            f"{index}: {index_size:,} bytes found, {expected:,} expected for {sequences:,} sequences and {borders:,} document "
            f"borders; {remedy}"
        )
    if not sequences or not size:
        raise DataError(f"{path}: no tokens; give a dataset with some")
    found = DocumentIndex(index, np.dtype(MEGATRON_DTYPES[code]).itemsize, sequences, borders)
    _check_fit(found, path, size, remedy)
    return TokenFile(path, "megatron", MEGATRON_DTYPES[code], 0, size // found.itemsize, size, found)


def _check_fit(index: DocumentIndex, path: Path, size: int, remedy: str) -> None:
    """Raise DataError unless the sequences cover the `.bin` in order and without gaps, and the documents cover the sequences."""
    sizes, pointers, first = index.sizes(), index.pointers(), index.first_sequences()
    end = 0
    for start in range(0, index.sequences, CHUNK):
        lengths = sizes[start : start + CHUNK].astype(np.int64) * index.itemsize
        begins = end + np.cumsum(lengths) - lengths
        if (lengths < 0).any() or not np.array_equal(begins, pointers[start : start + CHUNK]):
            raise DataError(f"{index.path}: its sequences do not follow one another; {remedy}")
        end = int(begins[-1] + lengths[-1])
    if end != size:
        raise DataError(f"{path}: {size:,} bytes found, {end:,} expected by {index.path.name}; {remedy}")
    if not len(first) or first[0] != 0 or first[-1] != index.sequences or (np.diff(first) < 0).any():
        raise DataError(f"{index.path}: its documents do not span its {index.sequences:,} sequences; {remedy}")
