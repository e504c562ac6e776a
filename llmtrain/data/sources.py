"""Text sources: one iterator of documents per split, the same on every run.

`stories`         5,269 stories of TinyStories, which are part of this package (tinystories/README.md)
`stdlib`          the .py files of the running Python's standard library, one document each
`python`          those, and the .py files of the packages that llmtrain requires; some packages are held out completely
a file or folder  .txt and .txt.gz (cut at `data.separator`), .jsonl, .jsonl.gz, .json.gz, .parquet; a folder's files sorted by path
`hf:OWNER/NAME`   a dataset on the Hugging Face hub, streamed

Token files of other tools are sources, too: see `ready_made`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from pydantic import BaseModel

from llmtrain.config import DataSection
from llmtrain.data.bytes_read import BytesRead
from llmtrain.data.hub import require
from llmtrain.data.local_files import stamps, without_held_out
from llmtrain.data.python_files import LIBRARY, PYTHON, STDLIB, PythonText, package_named, python_text, read_stdlib
from llmtrain.data.rows import no_column, text_of_row
from llmtrain.errors import DataError, UnavailableError, first_line, kind_of
from llmtrain.files import local_path, visible_files
from llmtrain.waiting import announced

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
HUB = "hf:"
CHUNK = 1 << 20
"""Characters of a text file that are read at once."""
SKIPPED_DOCUMENTS = 1000
"""Documents between two reports on text that is skipped."""
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
    packages are held out instead, and of equal files only the first one is read.
    """

    def __init__(
        self,
        data: DataSection,
        key: SourceKey,
        start: Position | None = None,
        on_skipped: Callable[[int], None] = lambda documents: None,
    ) -> None:
        """Call `on_skipped` now and then with the number of documents read so far, while a local text is read up to `start`."""
        self._data, self._key, self._start, self._on_skipped = data, key, start or Position(), on_skipped
        self.documents = self._start.documents
        """Number of documents up to and including the last one yielded."""
        self.bytes_read = BytesRead()
        """Bytes read of the files; unknown for the hub."""
        self._hub: _HubDataset | None = None

    def __iter__(self) -> Iterator[tuple[Split, str]]:
        """Yield (split, text) of each document. Raises DataError if the source is unusable."""
        data = self._data
        if data.source.startswith(HUB):
            split = data.split if self._key == "data.source" else data.validation
            self._hub = _HubDataset(data, split or data.split, self._key, self._start)
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
        for number in range(1, self._start.documents + 1):
            if next(texts, None) is None:
                return
            if number % SKIPPED_DOCUMENTS == 0:
                self._on_skipped(number)
        yield from texts

    def position(self) -> Position:
        """Return the place after the last document yielded."""
        if self._hub is None:
            return Position(documents=self.documents)
        return self._hub.position(self.documents)


def source_keys(data: DataSection) -> tuple[SourceKey, ...]:
    """Return the keys under which text is read."""
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
        identity["files"] = stamps(_files_of(data, "data.source"))
    if data.validation is not None:
        identity["validation"] = stamps(_files_of(data, "data.validation"))
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
            yield from islice(_read_txt(path, DataSection(), read), 1, None)
    else:
        for path in read.files(_files_of(data, key)):
            yield from _reader(path)(path, data, read)


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


# ---- local files


def _files_of(data: DataSection, key: SourceKey) -> list[Path]:
    if key == "data.validation":
        return _files(data.validation or "", key)
    found = _files(data.source, key)
    # In the section of a text of `eval.sets`, the two are equal, and nothing is trained on.
    if data.validation in (None, data.source):
        return found
    return without_held_out(found, _files_of(data, "data.validation"), data)


def _files(source: str, key: str) -> list[Path]:
    """Return the files that a reader exists for at a path, sorted. Hidden files and folders inside a folder are skipped."""
    path, known = local_path(source), ", ".join(READERS)
    if path is not None and path.is_file():
        if _reader(path) is None:
            raise DataError(f"{key}: {source}: unknown kind of file; expected {known}, or tokens: .bin, .npy")
        return [path]
    if path is None or not path.is_dir():
        what = "stories, stdlib, python, a path, or hf:OWNER/NAME" if key == "data.source" else "a file or folder"
        raise DataError(f"{key}: {source}: no such file or folder; expected {what}")
    try:
        found = [file for file in visible_files(path) if _reader(file) is not None]
    except OSError as error:
        raise DataError(
            f"{key}: {source}: {error.filename} can't be read ({error.strerror}); give a folder of text"
        ) from None
    if not found:
        raise DataError(
            f"{key}: {source}: no text in this folder; expected files that end in {known}, or tokens: .bin, .npy"
        )
    return found


def _read_txt(path: Path, data: DataSection, read: BytesRead) -> Iterator[str]:
    """Yield the documents between separators, stripped. Not more than one document and one chunk of the file is in memory."""
    try:
        with path.open("rb") as raw, io.TextIOWrapper(_unzipped(path, raw), encoding="utf-8") as file:
            read.follow(raw, path.stat().st_size)
            yield from split_text(file, data.separator)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason}); convert it first (iconv -t utf-8)") from None
    except DAMAGED_GZIP as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def split_text(file: TextIO, separator: str | None) -> Iterator[str]:
    """Yield the texts between separators, stripped, without empty ones; the whole text without a separator. Not more than one of
    them and one chunk of the file is in memory."""
    begun: list[str] = []  # parts of a text that has not ended
    rest = ""  # the last part, in which the separator may begin
    while chunk := file.read(CHUNK):
        rest += chunk
        if separator:
            *complete, rest = rest.split(separator)
            for text in complete:
                yield from _without_empty([*begun, text])
                begun = []
        end = len(rest) - len(separator or "") + 1
        if end > 0:
            begun.append(rest[:end])
            rest = rest[end:]
    yield from _without_empty([*begun, rest])


def _without_empty(parts: Sequence[str]) -> Iterator[str]:
    """Yield the text that the parts form, stripped, unless it is empty."""
    if text := "".join(parts).strip():
        yield text


def _read_jsonl(path: Path, data: DataSection, read: BytesRead) -> Iterator[str]:
    try:
        with path.open("rb") as raw, _unzipped(path, raw) as lines:
            read.follow(raw, path.stat().st_size)
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:  # also for too many digits, and for too deep nesting
                    raise DataError(
                        f"{path}:{number}: not JSON ({first_line(error)}); expected one object per line"
                    ) from None
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: expected a JSON object per line, found {kind_of(row)}")
                yield from text_of_row(row, data.text_key, f"{path}:{number}")
    except DAMAGED_GZIP as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise _unreadable(path, error) from None


DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)


def _unzipped(path: Path, raw: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    return gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: damaged gzip file ({first_line(error)}); copy it again")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: can't be read ({error.strerror}); look at its permissions and its disk")


def _read_parquet(path: Path, data: DataSection, read: BytesRead) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            if data.text_key not in table.schema_arrow.names:
                raise DataError(no_column(path, data.text_key, table.schema_arrow.names))
            rows, size = 0, path.stat().st_size
            for batch in table.iter_batches(batch_size=1024, columns=[data.text_key]):
                rows += len(batch)
                read.current = partial(int, size * rows / table.metadata.num_rows)
                for row in batch.to_pylist():
                    yield from text_of_row(row, data.text_key, path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as parquet ({first_line(error)}); copy it again") from None


READERS: dict[str, Callable[[Path, DataSection, BytesRead], Iterator[str]]] = {
    ".txt": _read_txt,
    ".txt.gz": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json.gz": _read_jsonl,
    ".parquet": _read_parquet,
}


def _reader(path: Path) -> Callable[[Path, DataSection, BytesRead], Iterator[str]] | None:
    return next((reader for ending, reader in READERS.items() if path.name.lower().endswith(ending)), None)


# ---- the hub


class _HubDataset:
    """Stream of a hub dataset's documents from a position on. Raises DataError if the hub or the dataset can't be used."""

    def __init__(self, data: DataSection, split: str, key: str, start: Position) -> None:
        self._data = data
        name = data.source.removeprefix(HUB)
        instead = "data.source=/path/to/files or data.source=stdlib"
        newest = require(name, "dataset", key="data.source", instead=instead)
        self.revision = start.hub_revision or newest
        import datasets

        try:
            with announced(f"the Hugging Face hub to list the files of {name}"):
                self._rows = datasets.load_dataset(
                    name, data.subset, split=split, streaming=True, revision=self.revision
                )
        except (ValueError, OSError) as error:  # unknown subset or split, or no data files that datasets knows
            split_key = "data.split" if key == "data.source" else key
            kind = DataError if isinstance(error, ValueError | FileNotFoundError) else UnavailableError
            raise kind(
                f"{data.source}: data.subset={data.subset or 'null'}, {split_key}={split}: {first_line(error)}"
            ) from None
        if start.hub_state is not None:
            self._rows.load_state_dict(start.hub_state)

    def __iter__(self) -> Iterator[str]:
        for row in _stream_errors_as_unavailable(self._rows, self._data.source):
            yield from text_of_row(row, self._data.text_key, self._data.source)

    def position(self, documents: int) -> Position:
        """Return the place after the last document yielded, which was number `documents`."""
        return Position(documents=documents, hub_revision=self.revision, hub_state=self._rows.state_dict())


def _stream_errors_as_unavailable(rows: Iterable[dict[str, Any]], source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows. Raises UnavailableError for any exception of the streaming libraries, such as a broken connection."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise UnavailableError(
                f"{source}: reading it from the hub failed ({first_line(error)}); start the same command again, or download it "
                "and give the folder as data.source"
            ) from error
        yield row
