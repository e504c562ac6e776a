"""Disks that are full or read-only, for tests: root ignores permissions, but no mount's options."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *mounts: list[str]) -> Iterator[None]:
    """Mounts on a folder, made with these options one after another, while it lasts. Skips the test where none can be made."""
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
    """A folder that can't be written while it lasts."""
    return mounted(folder, ["--bind", str(folder)], ["-o", "remount,ro,bind"])
