"""Exported folders, which appear complete or not at all, and are recognized when the same export is requested again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from llmtrain.errors import UserError
from llmtrain.export.parity import Parity

MANIFEST = "export.json"
CARD = "README.md"
LOCK_SECONDS = 3600.0
"""Seconds to wait for another process that exports to the same folder."""


class Manifest(BaseModel, extra="forbid", frozen=True):
    """Manifest of an exported folder (export.json), which records what the folder was made from."""

    format: Literal[1] = 1
    step: int
    weights: str
    dtype: str
    checkpoint: str
    """Digest of the checkpoint."""
    max_shard_size: str
    parameters: int
    parity: Parity
    files: dict[str, int]
    """Bytes of every file except this one and the model card, which is rewritten when there are new results."""


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`, or None unless it is an export whose files all have their recorded size."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return None
    whole = all((folder / name).is_file() and (folder / name).stat().st_size == n for name, n in manifest.files.items())
    return manifest if whole else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which is the last file written before the folder gets its final name."""
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in `folder` except the model card."""
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != CARD}


@contextmanager
def locked(final: Path, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock that lets one process at a time export to `final`.

    Raises UserError if the lock is not available within `timeout` seconds, or if the folder cannot be written.
    """
    lock = FileLock(final.parent / f".{final.name}.lock", timeout=timeout)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{final}: another process has been exporting it for {timeout:g} s (it holds {lock.lock_file}); wait for it "
            "or stop it"
        ) from None
    except OSError as error:
        raise UserError(f"{final} can't be written ({error.strerror}); choose another folder with --out") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to `final`, which then replaces `final`.

    If the caller's block raises, the temporary folder is deleted instead. Raises UserError if `final` exists and is
    neither an export nor an empty folder.
    """
    if final.exists() and not (final.is_dir() and ((final / MANIFEST).is_file() or not any(final.iterdir()))):
        raise UserError(f"{final} exists and is not an exported model; choose another folder with --out")
    temporary, retired = (final.with_name(f".{final.name}.{word}") for word in ("tmp", "old"))
    for leftover in (temporary, retired):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if final.exists():
            final.rename(retired)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)
