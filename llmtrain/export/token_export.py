"""Export of prepared tokens in the formats of other tools: nanoGPT, llm.c, Megatron-LM and NumPy.

Tokens are read and written in parts. The folder appears complete or not at all. It also contains the tokenizer, and
tokens.json, which describes the tokens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
from pydantic import BaseModel

from llmtrain.config import DataSection
from llmtrain.data.dataset import TOKENIZER, TokenDataset, TokenShards
from llmtrain.data.sources import SPLITS
from llmtrain.data.token_digests import token_digest
from llmtrain.data.token_files import HEADER_INTS, LLM_C_KINDS, MEGATRON_DTYPES, MEGATRON_HEADER, MEGATRON_MAGIC, Kind
from llmtrain.errors import UserError
from llmtrain.export.folder import CARD, check_replaceable, destination, locked, note, replacing

MANIFEST = "tokens.json"
KINDS: tuple[Kind, ...] = get_args(Kind)
WORDS = ("exported tokens", "prepare RECIPE --export FOLDER")
"""Name of a folder of exported tokens, and the command that makes it, for messages."""
NAMES = {"train": "train", "validation": "val"}
"""Prefixes of file names by split, as in nanoGPT and llm.c."""
SHARD_TOKENS = 100_000_000
"""Tokens per file in llm.c's format, as in its own datasets."""
CHUNK = 1 << 22
LARGEST_UINT16 = 1 << 16


class ExportedSplit(BaseModel, frozen=True):
    """Entry of tokens.json for one split."""

    files: list[str]
    tokens: int
    documents: int
    """Number of eos tokens, each of which ends a document."""
    text_bytes: int | None
    """UTF-8 bytes of the text, if known."""


class TokenManifest(BaseModel, frozen=True):
    """Schema of tokens.json."""

    format: Kind
    dtype: str
    source: str
    tokenizer: str
    vocab_size: int
    eos: str
    eos_id: int
    digest: str
    """Text from `token_digest`: token counts, vocabulary size, and a digest of windows of the tokens."""
    splits: dict[str, ExportedSplit]


def parse_kind(name: str | None, final: Path) -> Kind:
    """Return the format called `name`. Raises UserError if no format has this name, or if an export can't replace `final`."""
    check_replaceable(final, MANIFEST, *WORDS)
    found = next((kind for kind in KINDS if kind == name), None)
    if found is None:
        given = "is missing" if name is None else f"is {name}"
        raise UserError(f"--format {given}, expected {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    return found


def token_destination(folder: Path, data: DataSection) -> Path:
    """Return the absolute path of the folder to write. Raises UserError if it is `/`, or if it contains `data.cache_dir`."""
    final = destination(folder, WORDS[1])
    if Path(os.path.realpath(data.cache_dir)).is_relative_to(final):
        raise UserError(
            f"--export {folder} contains data.cache_dir={data.cache_dir}; choose another folder for one of them"
        )
    return final


def check_kind(kind: Kind, vocab_size: int) -> None:
    """Raise UserError if the format can't hold the token ids of a vocabulary of this size."""
    if kind == "nanogpt" and vocab_size > LARGEST_UINT16:
        raise UserError(
            f"--format {kind}: a vocabulary of {vocab_size:,}, but nanoGPT's files hold uint16, up to {LARGEST_UINT16:,}; choose "
            "llm.c, megatron or npy"
        )


def export_tokens(prepared: TokenDataset, data: DataSection, kind: Kind, final: Path) -> TokenManifest:
    """Write the prepared tokens to the folder `final`: all validation tokens, and at most `data.max_tokens` training tokens.
    Raises UserError if the format can't hold the tokens, or if the folder can't be written or replaced."""
    prepared = TokenDataset(prepared.directory, prepared.index, {"train": data.max_tokens} if data.max_tokens else {})
    check_kind(kind, prepared.vocab_size)
    with locked(final), replacing(final, MANIFEST, *WORDS) as folder:
        manifest = TokenManifest(
            format=kind,
            dtype=np.dtype(_dtype(kind, prepared.vocab_size)).name,
            source=prepared.index.source,
            tokenizer=prepared.index.tokenizer,
            vocab_size=prepared.vocab_size,
            eos=prepared.load_tokenizer().eos_token,
            eos_id=prepared.eos_id,
            digest=token_digest(prepared),
            splits={NAMES[split]: _write_split(prepared, split, kind, folder) for split in SPLITS},
        )
        shutil.copytree(prepared.directory / TOKENIZER, folder / TOKENIZER)
        (folder / CARD).write_text(_card(manifest, final, prepared.index.ready_made is not None), encoding="utf-8")
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def describe_token_export(folder: Path, manifest: TokenManifest) -> str:
    """Return the line that the command prints."""
    counts = ", ".join(f"{split.tokens:,} {name} tokens" for name, split in manifest.splits.items())
    return f"{folder}: {counts} in {manifest.dtype}, format {manifest.format}"


def _dtype(kind: Kind, vocab_size: int) -> str:
    if vocab_size <= LARGEST_UINT16:
        return "<u2"
    return "<i4" if kind == "megatron" else "<u4"


def _write_split(prepared: TokenDataset, split: str, kind: Kind, folder: Path) -> ExportedSplit:
    tokens, entry = prepared.tokens(split), prepared.index.splits[split]
    note(f"writing {len(tokens):,} {split} tokens ({kind})")
    ends = DocumentLengths(prepared.eos_id)
    files = WRITERS[kind](tokens, NAMES[split], folder, np.dtype(_dtype(kind, prepared.vocab_size)), ends)
    is_complete = len(tokens) == entry.tokens and prepared.index.ready_made is None
    return ExportedSplit(
        files=files,
        tokens=len(tokens),
        documents=ends.count,
        text_bytes=entry.text_bytes if is_complete else None,
    )


class DocumentLengths:
    """Lengths of the documents in a stream of tokens. A document includes its eos."""

    def __init__(self, eos: int) -> None:
        self._eos = eos
        self._lengths: list[np.ndarray] = []
        self._open = 0
        """Tokens since the last eos."""
        self.count = 0
        """Number of eos tokens."""

    def add(self, ids: np.ndarray) -> None:
        ends = np.flatnonzero(ids == self._eos) + 1
        lengths = np.diff(ends, prepend=-self._open)
        self._open = len(ids) - int(ends[-1]) if len(ends) else self._open + len(ids)
        self._lengths.append(lengths)
        self.count += len(ends)

    def lengths(self) -> np.ndarray:
        """Return the lengths in tokens; the last document may lack its eos."""
        rest = [self._open] if self._open else []
        found = np.concatenate([*self._lengths, np.array(rest, dtype=np.int64)])
        if (longest := found.max(initial=0)) >= 1 << 31:
            raise UserError(f"--format megatron: a document of {longest:,} tokens; its index holds up to 2,147,483,647")
        return found


Writer = Callable[[TokenShards, str, Path, np.dtype, DocumentLengths], list[str]]


def _parts(
    tokens: TokenShards, start: int, end: int, dtype: np.dtype, documents: DocumentLengths
) -> Iterator[memoryview | bytes]:
    """Yield the bytes of tokens [start, end), and count their documents."""
    for first in range(start, end, CHUNK):
        ids = tokens.window(first, min(CHUNK, end - first)).astype(dtype, copy=False)
        documents.add(ids)
        yield ids.tobytes()


def _write_nanogpt(
    tokens: TokenShards, name: str, folder: Path, dtype: np.dtype, documents: DocumentLengths
) -> list[str]:
    with (folder / f"{name}.bin").open("wb") as file:
        file.writelines(_parts(tokens, 0, len(tokens), dtype, documents))
    return [f"{name}.bin"]


def _write_llm_c(
    tokens: TokenShards, name: str, folder: Path, dtype: np.dtype, documents: DocumentLengths
) -> list[str]:
    magic, version = next((magic, version) for magic, (version, held) in LLM_C_KINDS.items() if dtype == np.dtype(held))
    files = []
    for start in range(0, len(tokens), SHARD_TOKENS):
        end = min(start + SHARD_TOKENS, len(tokens))
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = magic, version, end - start
        files.append(f"{name}_{len(files):06d}.bin")
        with (folder / files[-1]).open("wb") as file:
            file.write(header.tobytes())
            file.writelines(_parts(tokens, start, end, dtype, documents))
    return files


def _write_megatron(
    tokens: TokenShards, name: str, folder: Path, dtype: np.dtype, documents: DocumentLengths
) -> list[str]:
    _write_nanogpt(tokens, name, folder, dtype, documents)
    lengths = documents.lengths()
    code = next(code for code, held in MEGATRON_DTYPES.items() if dtype == np.dtype(held))
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    with (folder / f"{name}.idx").open("wb") as file:
        file.write(MEGATRON_HEADER.pack(MEGATRON_MAGIC, 1, code, len(lengths), len(lengths) + 1))
        for array in (lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")):
            file.write(array.tobytes())
    return [f"{name}.bin", f"{name}.idx"]


def _write_npy(tokens: TokenShards, name: str, folder: Path, dtype: np.dtype, documents: DocumentLengths) -> list[str]:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (len(tokens),)}
    with (folder / f"{name}.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.writelines(_parts(tokens, 0, len(tokens), dtype, documents))
    return [f"{name}.npy"]


WRITERS: dict[Kind, Writer] = {
    "nanogpt": _write_nanogpt,
    "llm.c": _write_llm_c,
    "megatron": _write_megatron,
    "npy": _write_npy,
}


def _card(manifest: TokenManifest, final: Path, is_ready_made: bool) -> str:
    """Return the text of the folder's README. With `is_ready_made`, the tokens come from another tool's files."""
    eos, rows = f"`{manifest.eos}` ({manifest.eos_id})", []
    separators = (
        f"Documents are separated as in the token files that were read; the tokenizer's eos token is {eos}."
        if is_ready_made
        else f"Every document ends with {eos}; no other special tokens were added."
    )
    for split in manifest.splits.values():
        first_and_last = dict.fromkeys([*split.files[:1], *split.files[-1:]])
        rows.append(f"| {', '.join(first_and_last)} | {split.tokens:,} | {split.documents:,} |")
    return "\n".join(
        [
            f"# Tokens of {manifest.source}\n",
            f"Tokenized with {manifest.tokenizer} (folder `{TOKENIZER}`), a vocabulary of {manifest.vocab_size:,}; written by "
            f"llmtrain as {manifest.dtype} in the format {manifest.format}. {separators} `{MANIFEST}` "
            "says the same for programs.\n",
            "| files | tokens | documents |",
            "| --- | --- | --- |",
            *rows,
            f"\nTo train on them: `data.source={final} data.tokenizer={final / TOKENIZER}`\n",
        ]
    )
