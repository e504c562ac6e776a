"""Local files of a text: their paths, the values that identify them, and their documents."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from llmtrain.config import DataSection
from llmtrain.data.bytes_read import BytesRead
from llmtrain.data.rows import no_column, text_of_row
from llmtrain.errors import DataError, data_error, first_line, kind_of
from llmtrain.files import local_path, visible_files

CHUNK = 1 << 20
"""Characters of a text file that are read at once."""


SKIPPED = (".arrow", ".bz2", ".csv", ".gz", ".json", ".tsv", ".xz", ".zip", ".zst")
"""Endings of files that may hold text but have no reader."""


def source_files(data: DataSection, key: str) -> list[Path]:
    """Return the text files of `data.source` or `data.validation`, whichever `key` names. Raises DataError if there are none."""
    if key == "data.validation":
        return _files(data.validation or "", key)
    found = _files(data.source, key)
    # For a text of `eval.sets`, the two are equal, because the text is only validated on.
    if data.validation in (None, data.source):
        return found
    return without_held_out(found, source_files(data, "data.validation"), data)


def _files(source: str, key: str) -> list[Path]:
    """Return the file at a path or, if it is a folder, its files that have a reader, sorted. Hidden files and folders
    inside a folder are skipped."""
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
        problem = f"{key}: {source}: {error.filename} can't be read ({error.strerror}); give a folder of text"
        raise data_error(problem, error) from None
    if not found:
        raise DataError(
            f"{key}: {source}: no text in this folder; expected files that end in {known}, or tokens: .bin, .npy"
        )
    return found


def describe_skipped(source: str) -> str | None:
    """Return a line about the files of a folder that may hold text but have no reader, or None if there are none."""
    path = local_path(source)
    if path is None or not path.is_dir():
        return None
    files = visible_files(path)
    skipped = Counter(file.suffix.lower() for file in files if _reader(file) is None)
    kinds = ", ".join(f"{ending} ({count})" for ending in SKIPPED if (count := skipped[ending]))
    return (
        f"{source}: {len(files) - skipped.total()} of {len(files)} files are read; not read: {kinds}" if kinds else None
    )


def without_held_out(files: Sequence[Path], held_out: Sequence[Path], data: DataSection) -> list[Path]:
    """Return the files of `data.source` that are not also files of `data.validation`. Raises DataError if none is left."""
    validated = {path.resolve() for path in held_out}
    if not (kept := [path for path in files if path.resolve() not in validated]):
        raise DataError(
            f"data.validation: {data.validation} has all files of data.source={data.source}, so none is left to train on; give "
            "another text, or leave it out to hold out data.validation_fraction of the documents"
        )
    return kept


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the absolute path, the size in bytes and the modification time in nanoseconds of each file."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def documents_of_file(path: Path, data: DataSection, read: BytesRead) -> Iterator[str]:
    """Yield the documents of a file that has a reader, and count the bytes read. Raises DataError if it is damaged."""
    yield from _reader(path)(path, data, read)


def _read_txt(path: Path, data: DataSection, read: BytesRead) -> Iterator[str]:
    """Yield the documents between separators, stripped. At most one document and one chunk of the file are in memory."""
    with open_text(path, read) as file:
        yield from split_text(file, data.separator)


@contextmanager
def open_text(path: Path, read: BytesRead) -> Iterator[TextIO]:
    """Open a text file, which may be compressed, and count the bytes read. Raises DataError, also later in the `with` block, if it
    is damaged or not UTF-8."""
    try:
        with path.open("rb") as raw, io.TextIOWrapper(_unzipped(path, raw), encoding="utf-8-sig") as file:
            read.follow(raw, path.stat().st_size)
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason}); convert it first (iconv -t utf-8)") from None
    except DAMAGED_GZIP as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def split_text(file: TextIO, separator: str | None) -> Iterator[str]:
    """Yield the texts between separators, stripped, and skip empty ones. Without a separator, yield the whole text. At
    most one text and one chunk of the file are in memory."""
    separator = separator and separator.replace("\r\n", "\n")  # as line breaks are read from a text file
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
    return data_error(f"{path}: can't be read ({error.strerror}); look at its permissions and its disk", error)


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
                share = int(size * rows / table.metadata.num_rows)
                read.current = partial(int, share)  # returns share
                for number, row in enumerate(batch.to_pylist(), start=rows - len(batch) + 1):
                    yield from text_of_row(row, data.text_key, f"{path}: row {number:,}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise data_error(f"{path}: can't be read as parquet ({first_line(error)}); copy it again", error) from None


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
