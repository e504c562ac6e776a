"""Finished pieces of evaluations, kept so that an interrupted one continues and a finished one is not repeated."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from llmtrain.errors import UserError

Key = dict[str, Any]
"""What a result depends on, as plain JSON values."""


class Entry(BaseModel):
    """What one task, text or set of prompts of a suite gave for one model."""

    model_config = ConfigDict(extra="forbid")

    scores: dict[str, dict[str, int | float | None]] = {}
    """{name: {metric: value, metric_stderr: standard error or None, n: documents}}."""
    about: dict[str, dict[str, Any]] = {}
    """{name: {version, few_shot, chance}}; chance is absent where the task has no such level."""
    shown: list[str] = []
    """Names that belong in the table; a group stands for its members."""
    answers: dict[str, dict[str, list[Any]]] = {}
    """{task: what is kept of each document}, see scores.answers."""
    written: list[dict[str, str]] = []
    """[{prompt, text}] of a suite's samples."""


class Cache:
    """A folder with a file for each finished piece of one checkpoint."""

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint

    def path(self, name: str, key: Key) -> Path:
        text = json.dumps(self._full_key(key), sort_keys=True)
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"

    def read(self, name: str, key: Key) -> Entry | None:
        """None if it was not finished, or the file is damaged."""
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
    """Write a file so that a crash leaves the old one or the new one. Raises UserError where nothing can be written."""
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
