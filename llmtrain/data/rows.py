"""Text in a row of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmtrain.errors import DataError, kind_of


def text_of_row(row: dict[str, Any], text_key: str, where: Path | str) -> Iterator[str]:
    """Yield the row's text unless it is null or blank. Raises DataError, which begins with `where`, for another kind of value."""
    if text_key not in row:
        raise DataError(no_column(where, text_key, list(row)))
    text = row[text_key]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: data.text_key={text_key} holds {kind_of(text)}, expected text")
    if text and not text.isspace():
        # JSON can contain half a surrogate pair, which is not a character and can't be encoded
        yield text.encode("utf-8", "replace").decode()


def no_column(where: Path | str, text_key: str, columns: Sequence[str]) -> str:
    """Return the error message for rows of `where` that lack the column `text_key`."""
    return f"{where}: no column data.text_key={text_key}; it has {', '.join(columns)}"
