"""Index and tokens of a prepared folder, and the checks made when the folder is opened.

<cache_dir>/<name>-<hash8>/index.json          read by this module
                           tokenizer/          as saved by transformers
                           train-00000.npy     token shards
                           validation-00000.npy
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from llmtrain.data.shards import Shard, TokenShards
from llmtrain.data.sources import Split
from llmtrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
INDEX = "index.json"
TOKENIZER = "tokenizer"


class SplitIndex(BaseModel, extra="forbid", frozen=True):
    """Index entry of one split."""

    tokens: int
    """Includes one eos token per document."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents; nats per token x tokens / text_bytes / ln 2 = bits per byte."""
    exhausted: bool
    """Whether the source ended before the requested number of tokens was reached."""
    shards: tuple[Shard, ...]


class Index(BaseModel, extra="forbid", frozen=True):
    """Schema of index.json."""

    format: Literal[1]
    source: str
    tokenizer: str
    vocab_size: int
    eos_id: int
    dtype: Literal["<u2", "<u4"]
    splits: dict[Split, SplitIndex]


@dataclass(frozen=True)
class TokenDataset:
    """Prepared token shards on disk, checked when opened."""

    directory: Path
    index: Index
    limits: Mapping[Split, int] = field(default_factory=dict)
    """Tokens per split that the recipe asks for. A run reads the same tokens even if an earlier run prepared more."""

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def eos_id(self) -> int:
        return self.index.eos_id

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.index.dtype)

    def tokens(self, split: Split) -> TokenShards:
        """Return all tokens of a split up to the recipe's limit, memory-mapped."""
        arrays = [np.load(self.directory / shard.name, mmap_mode="r") for shard in self.index.splits[split].shards]
        return TokenShards(arrays, self.limits.get(split))

    def bytes_per_token(self, split: Split) -> float:
        """Return the mean number of UTF-8 bytes of text per token."""
        return self.index.splits[split].text_bytes / self.index.splits[split].tokens

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer that produced the tokens. Needs no network."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory / TOKENIZER)


def open_dataset(directory: Path | str, limits: Mapping[Split, int] | None = None) -> TokenDataset:
    """Open a prepared folder. Raises DataError if the index or a shard is missing, truncated or inconsistent."""
    directory = Path(directory)
    remedy = f"delete {directory} and prepare again"
    try:
        index = Index.model_validate_json((directory / INDEX).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{directory / INDEX}: no such file; expected a folder made by prepare; {remedy}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise DataError(f"{directory / INDEX}: {where}: {problem['msg']}; {remedy}") from None
    for split in index.splits.values():
        for shard in split.shards:
            path = directory / shard.name
            if not path.is_file():
                raise DataError(f"{path}: no such file; expected {shard.bytes} bytes; {remedy}")
            if (size := path.stat().st_size) != shard.bytes:
                raise DataError(f"{path}: {size} bytes found, {shard.bytes} expected; {remedy}")
            try:
                array = np.load(path, mmap_mode="r")
                found = f"{array.dtype.str} {array.shape}"
            except ValueError as error:
                found = str(error)
            if found != (expected := f"{index.dtype} {(shard.tokens,)}"):
                raise DataError(f"{path}: another file's content ({found} found, {expected} expected); {remedy}")
    return TokenDataset(directory, index, limits or {})
