"""A prepared folder: its index, what is checked when it is opened, and the tokens in it.

<cache_dir>/<name>-<hash8>/index.json          what this module reads
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
    """One split."""

    tokens: int
    """With one eos token a document."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents: nats per token x tokens / text_bytes / ln 2 = bits per byte."""
    exhausted: bool
    """The source had no more."""
    shards: tuple[Shard, ...]


class Index(BaseModel, extra="forbid", frozen=True):
    """index.json."""

    format: Literal[1]
    source: str
    tokenizer: str
    vocab_size: int
    eos_id: int
    dtype: Literal["<u2", "<u4"]
    splits: dict[Split, SplitIndex]


@dataclass(frozen=True)
class TokenDataset:
    """Token shards on disk, opened and found whole."""

    directory: Path
    index: Index
    limits: Mapping[Split, int] = field(default_factory=dict)
    """Tokens that the recipe asked for: a run reads the same ones when an earlier run prepared more."""

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
        """All tokens of a split, up to the recipe's limit; memory-mapped."""
        arrays = [np.load(self.directory / shard.name, mmap_mode="r") for shard in self.index.splits[split].shards]
        return TokenShards(arrays, self.limits.get(split))

    def bytes_per_token(self, split: Split) -> float:
        """Mean UTF-8 bytes of text that a token stands for."""
        return self.index.splits[split].text_bytes / self.index.splits[split].tokens

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that made the tokens; needs no network."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory / TOKENIZER)


def open_dataset(directory: Path | str, limits: Mapping[Split, int] | None = None) -> TokenDataset:
    """Open a prepared folder; DataError if the index or a shard is missing, cut short or somebody else's."""
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
