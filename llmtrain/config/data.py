"""The section `data` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.section import Count, PathText, Section


class DataSection(Section):
    """Training and validation text, its tokenizer, and the folder of its token shards."""

    source: str = "stdlib"
    """`stories` (4 MB of TinyStories, part of this package), `stdlib` (Python's own source), `python` (that, and the
    Python files of the packages that llmtrain requires, 198 MB), a file (`.txt`, `.jsonl`, with or without `.gz`; `.parquet`), a
    folder of those, or `hf:OWNER/NAME` on the Hugging Face hub. Or token files, read in place: `.bin` of nanoGPT, llm.c or
    Megatron (with `.idx`), `.npy`, a folder or pattern (`tokens/*.bin`) of those."""
    subset: str | None = None
    """Configuration name of a hub data set (`sample-100BT`)."""
    split: str = "train"
    """Split of a hub data set."""
    text_key: str = "text"
    """Column or JSON key that holds the text."""
    separator: str | None = "<|endoftext|>"
    """Separator of the documents in a text file; `null`: each file is one document."""
    tokenizer: str = "gpt2"
    """A tokenizer's name on the hub, a folder, a `tokenizer.json`, a SentencePiece `tokenizer.model`, or `train:SIZE`
    (sentencepiece BPE trained on the source). Of token files: the tokenizer that made them."""
    tokenizer_sample_bytes: Count = 10_000_000
    """Maximum bytes of text on which `train:SIZE` trains: documents spread evenly over the first 20 times as many bytes."""
    validation: str | None = None
    """Source of the validation text: a file, a folder, or a split of the hub data set; `null`: held-out documents. Of token
    files: token files; `null`: those in the folder with `val` in their name, or else the last part of the tokens."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Fraction of the documents (of token files: of the tokens; of `python`: of the bytes, in whole packages) that is held out if
    `validation` is `null`."""
    max_tokens: Count | None = None
    """Maximum number of training tokens to prepare; `null`: whole files, and of a hub data set as much as the run reads."""
    packing: Literal["packed", "none"] = "packed"
    """`packed`: documents follow each other, and each sequence is the next `train.sequence_length` tokens. `none`: each sequence
    is one document, or the next part of a longer one. Sequences of similar length share a micro-batch and are padded to its
    longest. Padding does not count in the loss, and steps differ in their number of tokens."""
    shuffle: Literal["auto", "all", "blocks"] = "auto"
    """Samples that are shuffled with one another in the first epoch. `all`: all, so the first step waits for the last token.
    `blocks`: those of consecutive blocks of the source (2 M tokens, then twice as many each, at most 64 M), so a run begins
    with the first block and tokenizes the others while it trains; the order is that of the seed and the source, whatever is
    there when. `auto`: `blocks` for a hub data set, `all` for files. Later epochs always shuffle all."""
    cache_dir: PathText = "data"
    """Folder of the token shards. They are prepared once per source and tokenizer."""

    @property
    def at_most(self) -> str:
        """Return the words that belong before the tokens per step: "at most " without packing, else none."""
        return "at most " if self.packing == "none" else ""
