"""Mounts for tests of full and read-only disks. Permissions would not do, because root ignores them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *mounts: list[str]) -> Iterator[None]:
    """Mount on a folder with each list of options, in this order, and unmount on exit. Skip the test if a mount fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for options in mounts:
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["umount", str(folder)], capture_output=True)
            pytest.skip(f"this can't be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_only(folder: Path) -> AbstractContextManager[None]:
    """Return a context in which a folder can't be written to."""
    return mounted(folder, ["--bind", str(folder)], ["-o", "remount,ro,bind"])
