"""Paths that users give, and small files that must survive a crash: they are written atomically, and read past damaged lines.

This module does not import torch.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from llmtrain.errors import FULL, ResultsError, UserError, first_line

LONGEST_NAME, LONGEST_PATH = 230, 3800
"""Maximum lengths of a name and of a path that a user gives, in bytes. File systems allow 255 and 4,095. The difference leaves
room for appended parts, such as the suffix of a temporary file."""


def is_too_long(path: str | Path) -> bool:
    """Return whether a path is too long for a file system."""
    names = os.fsencode(path).split(b"/")
    return max(map(len, names)) > LONGEST_NAME or sum(map(len, names)) + len(names) > LONGEST_PATH


def check_path(path: str | Path) -> None:
    """Raise UserError if a path is too long for a file system, or leads through a folder that may not be read.

    For such a path, methods of pathlib such as `is_file` raise OSError.
    """
    if is_too_long(path):
        raise UserError(f"{str(path)[:60]}... is too long for the name of a file; shorten it")
    try:
        os.stat(path)
    except PermissionError as error:
        raise UserError(
            f"{path} can't be looked up ({error.strerror}); choose another path, or change the permissions"
        ) from None
    except (OSError, ValueError):  # the command itself refuses or creates a path that does not exist
        return


def revalidate(folder: Path) -> None:
    """Make a network file system ask its server for a folder, by opening the folder and those above it. Otherwise, files that another
    host has created there may seem missing for up to a minute."""
    for path in (*reversed(folder.absolute().parents), folder):
        with suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def local_path(name: str) -> Path | None:
    """Return the file or folder that a user's text names, with `~` expanded, or None if it does not exist."""
    path = os.path.expanduser(name)
    return Path(path) if os.path.exists(path) else None  # False also for a text that is too long for a path


def nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, or else the nearest folder above it that exists, as an absolute path."""
    # Path.exists raises PermissionError below a folder that may not be read
    return next(one for one in (path, *path.absolute().parents) if os.path.exists(one))


def visible_files(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by path. Hidden files and folders are left out. Links to folders
    are followed, but each folder is read once. Raises OSError if one can't be listed."""

    def refuse(error: OSError) -> None:
        raise error

    found, folders, seen = [], [str(folder)], set()
    for start in folders:
        for path, below, names in os.walk(start, onerror=refuse):
            below[:] = sorted(name for name in below if not name.startswith("."))
            if (real := os.path.realpath(path)) in seen:
                below.clear()
                continue
            seen.add(real)
            folders += filter(os.path.islink, (os.path.join(path, name) for name in below))
            found += [Path(path, name) for name in names if not name.startswith(".")]
    return sorted(filter(os.path.isfile, found))


def is_bare_file_name(name: str) -> bool:
    """Return whether `name` is a plain file name, which can't lead out of its folder."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def atomic_write(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the old or the new content."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the renames durable, too
    finally:
        os.close(folder)


LOCK_HOLDER = ".lock.holder"
"""File in a locked folder that names the last process that locked it and, on a second line, the boot ID of its host. `.lock` can't
hold the name, because opening that file empties it."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with Linux's boot ID, which distinguishes hosts of the same name, such as pods of a Kubernetes Job that replace each other."""


def write_lock_holder(folder: Path) -> None:
    """Record that this process works in a folder that it has locked. On a full disk, leave no record instead of raising an error,
    because the process may be about to make room."""
    record = folder / LOCK_HOLDER
    try:
        record.write_text(f"process {os.getpid()} {_this_host()}", encoding="utf-8")
    except OSError as error:
        if error.errno not in FULL:
            raise
        record.unlink(missing_ok=True)  # it is empty, or names another process


def lock_holder(folder: Path) -> str:
    """Return the name of the process that works in a locked folder, for an error message."""
    return holder_text(folder).partition("\n")[0][:100] or "another process"


def is_held_elsewhere(folder: Path) -> bool:
    """Return whether the process that last locked a folder ran on another host, or before the last boot of this host."""
    text = holder_text(folder)
    return text != "" and not text.endswith(_this_host())


def holder_text(folder: Path) -> str:
    """Return the record of the process that last locked a folder; "" if there is no record, or if it can't be read."""
    try:
        return (folder / LOCK_HOLDER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _this_host() -> str:
    boot = ""
    with suppress(OSError):  # not Linux
        boot = BOOT_ID.read_text(encoding="utf-8").strip()
    return f"on {socket.gethostname()}\n{boot}".strip()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics.jsonl, or of a trace. Lines without a step, and lines that a crash has truncated
    or a disk has corrupted, are left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if (
            isinstance(line, dict)
            and "step" in line
            and not any(isinstance(line[tag], str | list | dict) for tag in line if "/" in tag)
        ):
            lines.append(line)
    return lines


NUMBERS = ("loss", "seconds", "steps", "sent")
"""Suffixes of the keys of a summary.json whose values are numbers."""


def text_for_number(summary: dict[str, Any]) -> str | None:
    """Return `key=value` for the first value of a summary.json that should be a number and is not, or None."""
    wrong = (key for key, value in summary.items() if key.endswith(NUMBERS) and isinstance(value, str | list | dict))
    return next((f"{key}={summary[key]!r}" for key in wrong), None)


LEAVE_OUT = "restore the file, or leave this run out"
"""Remedy for a damaged file of a user's run. Deleting the run would cost its checkpoints, which are worth more than the file."""


def read_mapping(path: Path, remedy: str = LEAVE_OUT) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file, or {} if the file does not exist. Raises ResultsError, whose message ends with
    `remedy`, if the file is damaged."""
    parse = json.loads if path.suffix == ".json" else yaml.safe_load
    try:
        value = parse(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError, yaml.YAMLError) as error:  # no file, invalid JSON or YAML, or not text
        raise ResultsError(f"{path} is damaged ({first_line(error)}); {remedy}") from error
    if not isinstance(value, dict | None):
        raise ResultsError(f"{path} holds no mapping; {remedy}")
    return value or {}


def set_aside(path: Path) -> Path:
    """Rename a file or folder to the first free name of PATH.old, PATH.old1, ... and return that. Raises OSError."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
    return path.rename(next(name for name in names if not name.exists()))
