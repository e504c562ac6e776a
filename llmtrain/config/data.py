"""The section `data` of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from llmtrain.config.section import Count, FileName, PathText, Section

HUB = "hf:"
"""Beginning of the name of a hub dataset in `data.source`."""
LISTS = ("sources", "per_replica")
"""Keys of `data` that name several texts instead of `source`."""


class SiteSection(Section):
    """Entry of `data.per_replica`: the text of one replica. Keys that it does not give are taken from `data`."""

    source: str
    """Text, as in `data.source`."""
    name: FileName
    """Name of the site in metrics and checkpoints. The default is the file name of the source, without its ending."""
    subset: str | None = None
    """Configuration name of a hub dataset; the default is `data.subset`."""
    split: str = "train"
    """Split of a hub dataset; the default is `data.split`."""
    text_key: str = "text"
    """Column or JSON key that holds the text; the default is `data.text_key`."""
    separator: str | None = "<|endoftext|>"
    """Separator of documents in a text file; the default is `data.separator`."""
    validation: str | None = None
    """Source of the validation text; the default is `data.validation`."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Fraction of the documents that is held out; the default is `data.validation_fraction`."""


class SourceSection(SiteSection):
    """Entry of `data.sources`: one text of a mixture. Keys that it does not give are taken from `data`."""

    name: FileName
    """Name of the text in metrics. The default is the file name of the source, without its ending."""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Share of the sequences, relative to the weights of the other entries."""


class DataSection(Section):
    """Training and validation text, its tokenizer, and the folder of its token shards."""

    source: str | None = "stdlib"
    """`stories` (4 MB of TinyStories, part of this package), `stdlib` (Python's own source), `python` (`stdlib` and the Python
    files of the packages that llmtrain requires, 198 MB), a file (`.txt`, `.jsonl`, with or without `.gz`; `.parquet`), a folder
    of those, or `hf:OWNER/NAME` on the Hugging Face hub. Or token files, read in place: `.bin` of nanoGPT, llm.c or Megatron
    (with `.idx`), `.npy`, a folder or pattern (`tokens/*.bin`) of those. `null` with `sources` or `per_replica`, which name texts
    instead."""
    sources: tuple[SourceSection, ...] = ()
    """Mixture of texts, `[{source, weight}, ...]`. In every 1,000 sequences, each text has its share to within one sequence, in
    an order set by the seed; every text has its own epochs, and its own validation text of `eval.tokens`. The run's validation
    loss is the mean by weight."""
    per_replica: tuple[SiteSection, ...] = ()
    """A text for each replica, `[{source}, ...]`: replica r reads entry r, and a node prepares only the texts of its own replicas.
    Replicas with equal entries form a site and divide its text equally. A continued run may have other entries, in any order. A
    site is known by its name: it continues where it stopped, also after an absence, and a new site starts at the beginning. Entries
    beyond the number of replicas are not read."""
    subset: str | None = None
    """Configuration name of a hub dataset (`sample-100BT`)."""
    split: str = "train"
    """Split of a hub dataset."""
    text_key: str = "text"
    """Column or JSON key that holds the text."""
    separator: str | None = "<|endoftext|>"
    """Separator of the documents in a text file; `null`: each file is one document."""
    tokenizer: str = "gpt2"
    """A tokenizer's name on the hub, a folder, a `tokenizer.json`, a SentencePiece `tokenizer.model`, or `train:SIZE`
    (sentencepiece BPE trained on the source, or on the first of `sources`). For token files: the tokenizer that made them."""
    tokenizer_sample_bytes: Count = 10_000_000
    """Maximum bytes of text on which `train:SIZE` trains: documents spread evenly over the first 20 times as many bytes."""
    validation: str | None = None
    """Source of the validation text: a file, a folder, or a split of the hub dataset; `null`: held-out documents. For token
    files: token files; `null`: those in the folder whose names have `val`, `valid` or `validation` as a word, or else the last
    part of the tokens."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Fraction of the documents (for token files, of the tokens; for `python`, of the bytes, in whole packages) that is held out
    if `validation` is `null`."""
    max_tokens: Count | None = None
    """Maximum number of training tokens to prepare per text; `null`: whole files, and as much of a hub dataset as the run
    reads."""
    packing: Literal["packed", "none"] = "packed"
    """`packed`: documents follow each other, and each sequence is the next `train.sequence_length` tokens. `none`: each sequence
    is one document, or the next part of a longer one. Sequences of similar length share a micro-batch and are padded to its
    longest. Padding does not count in the loss, and steps differ in their number of tokens."""
    shuffle: Literal["auto", "all", "blocks"] = "auto"
    """Scope of the shuffle in the first epoch. `all`: all samples are shuffled together, so the first step waits for the last token.
    `blocks`: samples are shuffled within consecutive blocks of the source (2 M tokens, then twice as many each, at most 64 M), so a
    run begins with the first block and tokenizes the others while it trains. The order depends on the seed and the source alone, not
    on the progress of the tokenization. `blocks` works only for one text, `packed`. `auto`: `blocks` for a hub dataset; `all` for
    files, without packing, and for mixtures and texts per replica. Later epochs always shuffle all."""
    num_proc: Annotated[int, Field(ge=1, le=256)] | None = None
    """Number of processes that tokenize on a node. With 1, the process that reads the text also tokenizes it; otherwise, these
    are additional processes that share its cores. `null`: a quarter of the cores, at least 1. Neither the tokens nor a continued
    run depend on it."""
    cache_dir: PathText = "data"
    """Folder of the token shards. They are prepared once per source and tokenizer."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Give the entries of lists their names and the keys that they share, so that they are complete when stored."""
        if not isinstance(data, Mapping):
            return data
        shared = {key: data[key] for key in SiteSection.model_fields if key in data and key != "source"}
        lists = {key: data[key] for key in LISTS if isinstance(data.get(key), list | tuple)}
        instead = {"source": None} if any(lists.values()) else {}
        completed = {key: tuple(_completed(entry, shared) for entry in entries) for key, entries in lists.items()}
        return {**instead, **data, **completed}

    @property
    def at_most(self) -> str:
        """Return the words that belong before the tokens per step: "at most " without packing, else none."""
        return "at most " if self.packing == "none" else ""

    @property
    def is_list(self) -> bool:
        """Return whether the recipe has several texts, or one for each replica."""
        return bool(self.sources or self.per_replica)

    def texts(self) -> dict[str, DataSection]:
        """Return the section of each text by its name, as if it were the only one; "" is the name of `source`."""
        entries = self.sources or self.per_replica
        if not entries:
            return {"": self}
        keys = SiteSection.model_fields.keys() - {"name"}
        alone: dict[str, Any] = {**dict.fromkeys(LISTS, ()), "shuffle": "all"}
        return {
            entry.name: self.model_copy(update={**{key: getattr(entry, key) for key in keys}, **alone})
            for entry in entries
        }


def _completed(entry: Any, shared: Mapping[str, Any]) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    source = entry.get("source")
    named = {"name": _name_of(source)} if isinstance(source, str) else {}
    return {**shared, **named, **entry}


def _name_of(source: str) -> str:
    """Return `fineweb` for `hf:HuggingFaceFW/fineweb` or `texts/fineweb.jsonl.gz`."""
    name = PurePath(source.removeprefix("hf:")).name.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_") or "text"
