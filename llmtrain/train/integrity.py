"""Checkpoint integrity: finding the checkpoints on disk and verifying their files by the names, sizes and digests in
state.json. The digest is XXH3, which is fast enough to keep up with disks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from llmtrain.errors import CheckpointError
from llmtrain.parallel.mesh import Mesh
from llmtrain.train.checkpoint_reader import is_bare_file_name

FORMAT = 6
STATE_FILE, CHECKSUM_KEY = "state.json", "sha256"
NAME = re.compile(r"step-(\d{8})")
Digest = tuple[int, str]
"""Size in bytes and 128-bit XXH3 in hex."""


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder in `checkpoints`."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all complete checkpoints in a `checkpoints` folder, oldest first."""
    if not directory.is_dir():
        return []
    named = ((NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match and (path / STATE_FILE).exists())


def checkpoint_folders(directory: Path) -> list[Path]:
    """Return every checkpoint in a `checkpoints` folder, oldest first, including those that have lost their
    state.json."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in paths if NAME.fullmatch(path.name))


def dump_state(state: dict[str, Any]) -> str:
    """Return the text of state.json: the state, followed by its own digest."""
    return json.dumps({**state, CHECKSUM_KEY: _digest_of(state)})


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state.json. Raises CheckpointError if it is damaged or has another format."""
    where = path / STATE_FILE
    try:
        state = json.loads(where.read_text())
        seal = state.pop(CHECKSUM_KEY, None)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} can't be read ({error})") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    if seal != _digest_of(state):
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} is not what was written")
    if strange := [name for name in state.get("files", ()) if not is_bare_file_name(name)]:
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} lists {strange[0]!r}, which is no file of its folder")
    return state


def _digest_of(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def digests(directory: Path, names: Sequence[str]) -> dict[str, Digest]:
    """Return the size and digest of each file."""
    return {name: ((directory / name).stat().st_size, _xxh3(directory / name)) for name in names}


def find_corruption(directory: Path, files: Mapping[str, Digest]) -> str | None:
    """Describe the first file that is missing, unreadable or changed. Returns None if all files are intact."""
    for name, (size, digest) in sorted(files.items()):
        path = directory / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
            if _xxh3(path) != digest:
                return f"{name} is not what was written: its digest differs"
        except FileNotFoundError:
            return f"{name} is gone"
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
    return None


def latest_valid(candidates: Sequence[Path], mesh: Mesh, note: Callable[[str], None]) -> Path | None:
    """Return the newest valid checkpoint of `candidates` (oldest first; only the main rank's list is used), or
    None if the list is empty. A collective of all ranks, each of which reads its share of the files. `note` receives
    a line for each checkpoint that is rejected.

    Raises CheckpointError, on every rank, if all candidates are damaged, because a run never starts from
    scratch on its own.
    """
    paths = mesh.broadcast_from_main(lambda: [str(path) for path in candidates])
    problem = ""
    for path in map(Path, reversed(paths)):
        state = mesh.broadcast_from_main(lambda path=path: _or_error(lambda: read_state(path)))
        if isinstance(state, str):
            problem = state
        elif (found := find_corruption_on_any_rank(path, state["files"], mesh)) is None:
            return path
        else:
            problem = f"{path} is damaged: {found}"
        note(f"{problem}; going back to the one before")
    if problem:
        raise CheckpointError(
            f"{problem}; no older checkpoint is whole either, of {len(paths)}; restore one, or delete them to train from the start"
        )
    return None


def find_corruption_on_any_rank(directory: Path, files: Mapping[str, Digest], mesh: Mesh) -> str | None:
    """Return the first problem that `find_corruption` finds on any rank. Each rank reads its share of the
    files. A collective of all ranks."""
    share = sorted(files)[mesh.world.rank :: mesh.world.size]
    return first_error_of_any_rank(find_corruption(directory, {name: files[name] for name in share}), mesh)


def first_error_of_any_rank(mine: str | None, mesh: Mesh) -> str | None:
    """Return the error of the lowest rank that has one, or None. A collective of all ranks."""
    said = mesh.all_ranks.all_gather_object(mine, "asking all ranks for problems of their disks")
    return next((one for one in said if one is not None), None)


def _or_error(read: Callable[[], dict]) -> dict | str:
    try:
        return read()
    except CheckpointError as error:
        return str(error)


def _xxh3(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
