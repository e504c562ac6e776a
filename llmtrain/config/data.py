"""The section `data` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.section import Count, Section


class DataSection(Section):
    """Training and validation text, its tokenizer, and the folder of its token shards."""

    source: str = "stdlib"
    """`stories` (4 MB of TinyStories, part of this package), `stdlib` (Python's own source), a file (`.txt`, `.jsonl`, with or
    without `.gz`; `.parquet`), a folder of those, or `hf:OWNER/NAME` on the Hugging Face hub."""
    subset: str | None = None
    """Configuration name of a hub data set (`sample-100BT`)."""
    split: str = "train"
    """Split of a hub data set."""
    text_key: str = "text"
    """Column or JSON key that holds the text."""
    separator: str | None = "<|endoftext|>"
    """Separator of the documents in a text file; `null`: each file is one document."""
    tokenizer: str = "gpt2"
    """A tokenizer's name on the hub, a folder or `tokenizer.json`, or `train:SIZE` (sentencepiece BPE trained on the source)."""
    validation: str | None = None
    """Source of the validation text: a file, a folder, or a split of the hub data set; `null`: held-out documents."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Fraction of the documents that is held out if `validation` is `null`."""
    max_tokens: Count | None = None
    """Maximum number of training tokens to prepare; `null`: whole files, and of a hub data set as much as the run reads."""
    shuffle: Literal["auto", "all", "blocks"] = "auto"
    """Samples that are shuffled with one another in the first epoch. `all`: all, so the first step waits for the last token.
    `blocks`: those of consecutive blocks of the source (2 M tokens, then twice as many each, at most 64 M), so a run begins
    with the first block and tokenizes the others while it trains; the order is that of the seed and the source, whatever is
    there when. `auto`: `blocks` for a hub data set, `all` for files. Later epochs always shuffle all."""
    cache_dir: str = "data"
    """Folder of the token shards. They are prepared once per source and tokenizer."""
