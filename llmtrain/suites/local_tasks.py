"""Local task files, read without lm-evaluation-harness: the tasks they define and the data they need."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llmtrain.errors import DataError, SuiteError


class TaskLoader(yaml.SafeLoader):
    """YAML loader that reads `!function a.b` as the text `a.b`."""


TaskLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


@dataclass(frozen=True)
class LocalTask:
    """A task, or a group of tasks, in a local folder."""

    name: str
    files: tuple[str, ...]
    """Data files, relative to --data-dir."""
    folder: Path


def local_tasks(folders: Sequence[Path]) -> dict[str, LocalTask]:
    """Return tasks and groups by name. A later folder takes precedence."""
    configs: dict[str, tuple[dict[str, Any], Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            config = _with_includes(path)
            name = config.get("group") or config.get("task")
            if isinstance(name, str):
                configs[name] = config, folder
    return {name: LocalTask(name, _files_of(name, configs), folder) for name, (_, folder) in configs.items()}


def digest_of(folder: Path) -> str:
    """Return a digest that changes when a task file or its code changes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def data_file(data_dir: Path | None, file: str, needed_by: str, key: str = "--data-dir") -> Path:
    """Return the path of `file` in the data folder that the user gave with `key`. Raises DataError if the
    folder or the file is missing."""
    if data_dir is None:
        raise DataError(f"{needed_by} reads {file}: give the folder that has it with {key}")
    path = data_dir / file
    if not path.is_file():
        what = "has no" if data_dir.is_dir() else "is not a folder, so it has no"
        raise DataError(f"{key} {data_dir} {what} {file}, which {needed_by} reads; see eval/README.md")
    return path


@cache
def content_digest(path: Path, size: int, modified: int) -> str:
    """Return the first 16 hex digits of a file's SHA-256. `size` and `modified` are cache keys, so that a
    changed file is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def digests(data_dir: Path | None, files: Sequence[str], needed_by: str) -> dict[str, str]:
    """Return {file: digest} of data files. Raises DataError if one is missing."""
    found = {}
    for file in files:
        path = data_file(data_dir, file, needed_by)
        found[file] = content_digest(path, path.stat().st_size, path.stat().st_mtime_ns)
    return found


def _with_includes(path: Path) -> dict[str, Any]:
    try:
        config = yaml.load(path.read_text(), TaskLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SuiteError(f"{path}: can't be read as a task file: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise SuiteError(f"{path}: holds no mapping, expected a task (task: NAME) or a group (group: NAME)")
    included = config.pop("include", None)
    return (_with_includes(path.parent / included) if included else {}) | config


def _files_of(name: str, configs: dict[str, tuple[dict[str, Any], Path]]) -> tuple[str, ...]:
    config = configs[name][0] if name in configs else {}
    if isinstance(config.get("task"), list):
        return tuple(
            file for member in config["task"] if isinstance(member, str) for file in _files_of(member, configs)
        )
    file = (config.get("dataset_kwargs") or {}).get("file")
    return (file,) if file else ()
