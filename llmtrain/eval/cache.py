"""Cache of finished evaluation units, so that an interrupted evaluation resumes and a finished one is not repeated."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from llmtrain.errors import UserError

Key = dict[str, Any]
"""Values that a result depends on besides the checkpoint, as plain JSON."""


class Entry(BaseModel):
    """Results of one task, text file or set of prompts for one checkpoint."""

    model_config = ConfigDict(extra="forbid")

    scores: dict[str, dict[str, int | float | None]] = {}
    """{name: {metric: value, metric_stderr: standard error or None, n: number of documents}}."""
    about: dict[str, dict[str, Any]] = {}
    """{name: {version, few_shot (text: window), members, chance}}; `chance` is absent if there is no chance level."""
    shown: list[str] = []
    """Names to show in the table; a group is shown instead of its members."""
    answers: dict[str, dict[str, list[Any]]] = {}
    """{task: {column: one value per document}}; see scores.per_document."""
    written: list[dict[str, str]] = []
    """[{prompt, text}] for each prompt of the suite; `text` includes the prompt."""


class Cache:
    """Cached results of one checkpoint: one JSON file per finished evaluation unit."""

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint

    def path(self, name: str, key: Key) -> Path:
        text = json.dumps(self._full_key(key), sort_keys=True)
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"

    def read(self, name: str, key: Key) -> Entry | None:
        """Return the cached entry, or None if the unit is not finished or its file is damaged."""
        try:
            content = json.loads(self.path(name, key).read_text())
            return Entry.model_validate(content["entry"]) if content["key"] == self._full_key(key) else None
        except (OSError, ValueError, KeyError, TypeError, ValidationError):
            return None

    def write(self, name: str, key: Key, entry: Entry) -> None:
        write_json(self.path(name, key), {"key": self._full_key(key), "entry": entry.model_dump()})

    def _full_key(self, key: Key) -> Key:
        return {"checkpoint": self.fingerprint, **key}


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON atomically: after a crash, the file has either its old or its new content.

    Raises UserError if the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as file:
            json.dump(value, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror}); choose another folder with --out") from None
