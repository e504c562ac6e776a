"""Check at the start that all hosts see the same run directory, to which each rank writes its part of every checkpoint."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmtrain.errors import RecipeError, TrainingError
from llmtrain.files import revalidate
from llmtrain.parallel.mesh import Mesh
from llmtrain.run_files import RECIPE
from llmtrain.waiting import announced

PATIENCE_SECONDS, POLL_SECONDS = 10.0, 0.2
"""Maximum seconds until a host must see a file that rank 0 has just written, and seconds between its checks."""
MAX_NAMED = 3
"""Maximum number of hosts in the message."""
ADVICE = "mount the same file system on all nodes, or give run.out_dir a folder that they share"


def check_is_shared(folder: Path, mesh: Mesh, timeout_seconds: float) -> None:
    """Raise an error, on every rank, if the hosts do not share the run directory `folder`, which exists on rank 0's
    host. A collective of all ranks.

    Raises RecipeError for a run that has not begun. Raises TrainingError for a run that has, because a host may lack
    the file system only temporarily.
    """
    if mesh.world.local_size == mesh.world.size:
        return
    probe = probe_file(folder)
    try:
        name = mesh.broadcast_from_main(lambda: _create(probe))
        mine = None
        if mesh.world.local_rank == 0:
            is_there = wait_for_file(folder / name, min(PATIENCE_SECONDS, timeout_seconds / 2))
            mine = socket.gethostname(), str(folder), is_there, os.path.exists(folder / RECIPE)
        told = mesh.all_ranks.all_gather_object(mine, "looking for the run directory on all hosts")
    finally:
        if mesh.is_main:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
    hosts = [host for host in told if host is not None]
    if problem := sharing_problem([(host, path, is_there) for host, path, is_there, _ in hosts]):
        error = (TrainingError if any(has_recipe for *_, has_recipe in hosts) else RecipeError)(f"{problem}; {ADVICE}")
        error.is_shared = True
        raise error


def probe_file(folder: Path) -> Path:
    """Return the path of a file by which hosts find out whether they share a folder. No host has looked up its name before."""
    return folder / f".{secrets.token_hex(8)}.shared"


def sharing_problem(hosts: Sequence[tuple[str, str, bool]]) -> str:
    """Return a message that names the hosts that do not share the run directory, or "" if all do. Each entry of `hosts`
    has the host's name, its path of the folder, and whether it sees there the file that rank 0, on the first host, has
    written."""
    without = [(host, path) for host, path, is_there in hosts if not is_there]
    if not without:
        return ""
    names = ", ".join(host for host, _ in without[:MAX_NAMED])
    more = f" and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
    first, path, _ = hosts[0]
    return (
        f"run.out_dir is not shared: {names}{more} can't see in {without[0][1]} what rank 0 on {first} writes to {path}"
    )


def _create(path: Path) -> str:
    path.touch()
    return path.name


def wait_for_file(path: Path, patience: float) -> bool:
    """Wait up to `patience` seconds until a file exists, and return whether it does."""
    deadline = time.monotonic() + patience
    with announced(f"the run directory {path.parent} to be that of rank 0", patience):
        while not os.path.exists(path):
            if time.monotonic() >= deadline:
                return False
            revalidate(path.parent)
            time.sleep(POLL_SECONDS)
    return True
