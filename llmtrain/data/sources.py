"""Text sources: one iterator of documents per split, the same on every run.

`stories`         5,269 stories of TinyStories, which are part of this package (tinystories/README.md)
`stdlib`          the .py files of the running Python's standard library, one document each
`python`          those, and the .py files of the packages that llmtrain requires; some packages are held out completely
a file or folder  .txt and .txt.gz (cut at `data.separator`), .jsonl, .jsonl.gz, .json.gz, .parquet; a folder's files sorted by path
`hf:OWNER/NAME`   a dataset on the Hugging Face hub, streamed

Token files of other tools are sources, too: see `ready_made`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from llmtrain.config import DataSection
from llmtrain.config.data import HUB
from llmtrain.data.bytes_read import BytesRead
from llmtrain.data.hub import HubDataset
from llmtrain.data.local_files import documents_of_file, source_files, stamps
from llmtrain.data.python_files import LIBRARY, PYTHON, STDLIB, PythonText, package_named, python_text, read_stdlib
from llmtrain.errors import DataError, UnavailableError
from llmtrain.files import local_path

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
SKIPPED_DOCUMENTS = 1000
"""Number of documents between two reports while text is skipped."""
ANEW = "after a correction, all files of this text are tokenized anew"
"""Last part of the error message about damaged text."""
STORIES = "stories"
STORIES_FILE = Path(__file__).parent / "tinystories" / "stories.txt.gz"
"""Stories between separators. The part before the first separator names their source and license."""

T = TypeVar("T")
SourceKey = Literal["data.source", "data.validation"]


class Position(BaseModel, extra="forbid", frozen=True):
    """Place in a source at which reading continues."""

    documents: int = 0
    """Number of documents before it."""
    hub_revision: str | None = None
    """Commit of the hub dataset, so that reading continues in the same text."""
    hub_state: dict[str, Any] | None = None
    """State of the hub dataset's iterator, which continues from it without reading the text before."""


class TextStream:
    """Iterable over the documents of `data.source` or `data.validation` and their splits, in a fixed order, from a
    position on.

    Without `data.validation`, a hash of each document's text decides whether the document is held out for validation. The
    splits are therefore disjoint in any order, and equal texts are always in the same split. With `python`, complete
    packages are held out instead, and only the first of several equal files is read.
    """

    def __init__(
        self,
        data: DataSection,
        key: SourceKey,
        start: Position | None = None,
        on_skipped: Callable[[int], None] = lambda documents: None,
    ) -> None:
        """Call `on_skipped` after every SKIPPED_DOCUMENTS documents that are skipped to reach `start` in a local text, with the
        number skipped so far."""
        self._data, self._key, self._start, self._on_skipped = data, key, start or Position(), on_skipped
        self.documents = self._start.documents
        """Number of documents up to and including the last one yielded."""
        self.bytes_read = BytesRead()
        """Bytes of the files that have been read; unknown for the hub."""
        self._hub: HubDataset | None = None

    def __iter__(self) -> Iterator[tuple[Split, str]]:
        """Yield (split, text) of each document. Raises DataError if the source is unusable."""
        data = self._data
        if data.source.startswith(HUB):
            split = data.split if self._key == "data.source" else data.validation
            start = self._start
            self._hub = HubDataset(data, split or data.split, self._key, start.hub_revision, start.hub_state)
            texts: Iterator[tuple[str | None, str]] = ((None, text) for text in self._hub)
        else:
            texts = self._after_start(_read(data, self._key, self.bytes_read))
        splits = splits_of(data, self._key)
        chosen = _python_text().validation_packages(data.validation_fraction) if data.source == PYTHON else set()
        for package, text in texts:
            self.documents += 1
            if len(splits) == 1:
                yield splits[0], text
                continue
            is_held_out = package in chosen if package else _held_out(text, data.validation_fraction)
            yield ("validation" if is_held_out else "train"), text

    def _after_start(self, texts: Iterator[T]) -> Iterator[T]:
        """Yield the documents of a local text after `start`. If the text is damaged after its first document, the error adds that
        a corrected text is tokenized anew."""
        try:
            for number in range(1, self._start.documents + 1):
                if next(texts, None) is None:
                    return
                if number % SKIPPED_DOCUMENTS == 0:
                    self._on_skipped(number)
            yield from texts
        except UnavailableError:
            raise
        except DataError as error:
            raise DataError(f"{error}; {ANEW}" if self.documents else str(error)) from None

    def position(self) -> Position:
        """Return the place after the last document yielded."""
        if self._hub is None:
            return Position(documents=self.documents)
        return Position(documents=self.documents, hub_revision=self._hub.revision, hub_state=self._hub.state_dict())


def source_keys(data: DataSection) -> tuple[SourceKey, ...]:
    """Return the recipe keys whose text is read, in the order of reading."""
    return ("data.source",) if data.validation is None else ("data.validation", "data.source")


def splits_of(data: DataSection, key: SourceKey) -> tuple[Split, ...]:
    """Return the splits to which the documents of `key` belong."""
    own: tuple[Split, ...] = ("train",) if key == "data.source" else ("validation",)
    return SPLITS if data.validation is None else own


def documents(data: DataSection, split: Split) -> Iterator[str]:
    """Yield every document of a split, in a fixed order. Raises DataError during iteration if the source is unusable."""
    key = next(key for key in source_keys(data) if split in splits_of(data, key))
    return (text for found, text in TextStream(data, key) if found == split)


def fingerprint(data: DataSection) -> dict[str, Any]:
    """Return JSON-serializable values that identify the source. They change when a local file changes or, for `stdlib` and
    `python`, when Python or a package is upgraded."""
    if data.source.startswith(HUB):
        return {"hub": data.source, "subset": data.subset, "split": data.split, "validation": data.validation}
    identity: dict[str, Any] = {}
    if data.source == STORIES:
        identity["stories"] = hashlib.blake2b(_stories_file().read_bytes(), digest_size=8).hexdigest()
    elif data.source == STDLIB:
        identity["stdlib"] = package_named(LIBRARY).record
    elif data.source == PYTHON:
        identity["python"] = _python_text().records
    else:
        identity["files"] = stamps(source_files(data, "data.source"))
    if data.validation is not None:
        identity["validation"] = stamps(source_files(data, "data.validation"))
    return identity


def _read(data: DataSection, key: SourceKey, read: BytesRead) -> Iterator[tuple[str | None, str]]:
    """Yield (package name, text) of each document of `data.source` or `data.validation`, whichever `key` names. The package
    name is None except for `python`. The text must be on this machine, and not on the hub."""
    if data.source == PYTHON and key == "data.source":
        yield from read.texts(_python_text().documents(), sum(record.bytes for record in _python_text().records))
    elif data.source == STDLIB and key == "data.source":
        yield from read.texts(((None, text) for text in read_stdlib()), package_named(LIBRARY).record.bytes)
    else:
        yield from ((None, text) for text in _read_files(data, key, read))


def _read_files(data: DataSection, key: SourceKey, read: BytesRead) -> Iterator[str]:
    if data.source == STORIES and key == "data.source":
        for path in read.files([_stories_file()]):
            yield from islice(documents_of_file(path, DataSection(), read), 1, None)
    else:
        for path in read.files(source_files(data, key)):
            yield from documents_of_file(path, data, read)


def _held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


# ---- what is on every machine


def _stories_file() -> Path:
    """Return the file of this package's stories. Raises DataError if the same name is also a file or folder here."""
    _refuse_local(STORIES, "this package's text")
    return STORIES_FILE


def _python_text() -> PythonText:
    """Return the text of `python`. Raises DataError if the same name is also a file or folder here."""
    _refuse_local(PYTHON, "the installed packages' text")
    return python_text()


def _refuse_local(name: str, meaning: str) -> None:
    if local_path(name) is not None:
        raise DataError(
            f"data.source: {name} is {meaning}, but also a file or folder here; write ./{name} for that, "
            "or start in another folder"
        )
