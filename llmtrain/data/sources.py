"""Text sources: one iterator of documents per split, the same on every run.

`stdlib`          the .py files of the running Python's standard library, one document each
a file or folder  .txt (cut at `data.separator`), .jsonl, .jsonl.gz, .json.gz, .parquet; a folder's files sorted by path
`hf:OWNER/NAME`   a dataset on the Hugging Face hub, streamed
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from llmtrain.config import DataSection
from llmtrain.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

HUB = "hf:"
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Names of folders to skip in the standard library: tests, third-party packages and bytecode caches."""


def documents(data: DataSection, split: Split) -> Iterator[str]:
    """Yield every document of a split, in a fixed order. Raises DataError during iteration if the source is unusable.

    Without `data.validation`, a hash of each document's text decides whether it is held out for validation. The
    splits are therefore disjoint in any order, and equal texts are always in the same split.
    """
    if data.validation is not None:
        yield from _read(data, "data.source" if split == "train" else "data.validation")
        return
    for text in _read(data, "data.source"):
        if _held_out(text, data.validation_fraction) == (split == "validation"):
            yield text


def fingerprint(data: DataSection) -> dict[str, Any]:
    """Return JSON-serializable values that identify the source. They change when a local file or the Python version
    changes."""
    if data.source.startswith(HUB):
        return {"hub": data.source, "subset": data.subset, "split": data.split, "validation": data.validation}
    identity: dict[str, Any] = {}
    if data.source == "stdlib":
        root = _stdlib_root()
        sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in _stdlib_files()]
        identity["stdlib"] = [platform.python_version(), sizes]
    else:
        identity["files"] = _stamps(_files(data.source, "data.source"))
    if data.validation is not None:
        identity["validation"] = _stamps(_files(data.validation, "data.validation"))
    return identity


def _read(data: DataSection, key: Literal["data.source", "data.validation"]) -> Iterator[str]:
    """Yield all documents of `data.source` or `data.validation`, whichever `key` names."""
    if data.source.startswith(HUB):
        split = data.split if key == "data.source" else data.validation
        yield from _read_hub(data, split or data.split, key)
    elif data.source == "stdlib" and key == "data.source":
        yield from _read_stdlib()
    else:
        for path in _files(data.source if key == "data.source" else data.validation or "", key):
            yield from _reader(path)(path, data)


def _held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


# ---- the standard library


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib_files() -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(_stdlib_root()):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _read_stdlib() -> Iterator[str]:
    files = _stdlib_files()
    if not files:
        raise DataError(f"data.source: stdlib: no .py files in {_stdlib_root()}; use data.source=/path/to/files")
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few files declare another encoding
            continue
        if text.strip():
            yield text


# ---- local files


def _files(source: str, key: str) -> list[Path]:
    """Return the files of readable types at a path, sorted. Hidden files and folders inside a folder are skipped."""
    path = Path(source).expanduser()
    known = ", ".join(READERS)
    if path.is_file():
        if _reader(path) is None:
            raise DataError(f"{key}: {source}: unknown kind of file; expected {known}")
        return [path]
    if not path.is_dir():
        raise DataError(f"{key}: {source}: no such file or folder; expected stdlib, a path, or hf:OWNER/NAME")
    found = sorted(file for file in path.rglob("*") if file.is_file() and _reader(file) is not None)
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not found:
        raise DataError(f"{key}: {source}: no text in this folder; expected files that end in {known}")
    return found


def _stamps(files: list[Path]) -> list[tuple[str, int, int]]:
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _read_txt(path: Path, data: DataSection) -> Iterator[str]:
    """Yield the documents between separators, stripped. At most one document and one chunk are in memory."""
    rest = ""
    try:
        with path.open(encoding="utf-8") as file:
            while chunk := file.read(1 << 20):
                rest += chunk
                if data.separator:
                    *complete, rest = rest.split(data.separator)
                    yield from filter(None, map(str.strip, complete))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason}); convert it first (iconv -t utf-8)") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if rest.strip():
        yield rest.strip()


def _read_jsonl(path: Path, data: DataSection) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: expected a JSON object a line, found {type(row).__name__}")
                yield from _text(row, data.text_key, f"{path}:{number}")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}:{number}: not JSON ({first_line(error)}); expected one object a line") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({first_line(error)}); copy it again") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: can't be read ({error.strerror}); look at its permissions and its disk")


def _read_parquet(path: Path, data: DataSection) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            if data.text_key not in table.schema_arrow.names:
                raise DataError(_no_column(path, data.text_key, table.schema_arrow.names))
            for batch in table.iter_batches(batch_size=1024, columns=[data.text_key]):
                for row in batch.to_pylist():
                    yield from _text(row, data.text_key, path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: can't be read as parquet ({first_line(error)}); copy it again") from None


READERS: dict[str, Callable[[Path, DataSection], Iterator[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json.gz": _read_jsonl,
    ".parquet": _read_parquet,
}


def _reader(path: Path) -> Callable[[Path, DataSection], Iterator[str]] | None:
    return next((reader for ending, reader in READERS.items() if path.name.lower().endswith(ending)), None)


# ---- the hub


def _read_hub(data: DataSection, split: str, key: str) -> Iterator[str]:
    name = data.source.removeprefix(HUB)
    require(name, "dataset", key="data.source", instead="data.source=/path/to/files or data.source=stdlib")
    import datasets

    try:
        rows = datasets.load_dataset(name, data.subset, split=split, streaming=True)
    except (ValueError, OSError) as error:  # unknown subset or split, or no data files that datasets knows
        key = "data.split" if key == "data.source" else key
        raise DataError(
            f"{data.source}: data.subset={data.subset or 'null'}, {key}={split}: {first_line(error)}"
        ) from None
    for row in _stream_errors_as_data_errors(rows, data.source):
        yield from _text(row, data.text_key, data.source)


def _stream_errors_as_data_errors(rows: Iterable[dict[str, Any]], source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows. Raises DataError for any exception of the streaming libraries, such as a broken connection."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(
                f"{source}: reading it from the hub failed ({first_line(error)}); start the same command again, or download it "
                "and give the folder as data.source"
            ) from error
        yield row


# ---- rows


def _text(row: dict[str, Any], text_key: str, where: Path | str) -> Iterator[str]:
    """Yield the row's text unless it is null or blank."""
    if text_key not in row:
        raise DataError(_no_column(where, text_key, list(row)))
    text = row[text_key]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: data.text_key={text_key} holds {type(text).__name__}, expected text")
    if text and not text.isspace():
        # JSON can contain half a surrogate pair, which is not a character and can't be encoded
        yield text.encode("utf-8", "replace").decode()


def _no_column(where: Path | str, text_key: str, columns: list[str]) -> str:
    return f"{where}: no column data.text_key={text_key}; it has {', '.join(columns)}"


TIMEOUT = 5.0
"""Seconds to wait for each of the hub's several addresses."""


def require(name: str, kind: Literal["dataset", "model"], *, key: str, instead: str) -> None:
    """Raise DataError unless the Hugging Face hub answers and has repository `name`. The message names `key` and,
    unless the repository does not exist, suggests `instead`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        raise DataError(
            f"{key}: the Hugging Face hub has no public {kind} {name!r}; check the name (log in if it is private)"
        ) from None
    except HFValidationError:
        raise DataError(f"{key}: {name!r} is neither a file or folder here nor a {kind} name; use {instead}") from None
    except Exception as error:
        raise DataError(
            f"{key}: {name!r} needs the Hugging Face hub, which can't be used from here ({first_line(error)}); "
            f"connect to the internet, or use {instead}"
        ) from None


def first_line(error: BaseException) -> str:
    """Return the first nonblank line of an exception's message, or its type's name if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
