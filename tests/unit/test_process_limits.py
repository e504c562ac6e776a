"""Cores and memory of a process: the machine's, limited by its affinity and the cgroups of containers and Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmtrain import process_limits
from llmtrain.process_limits import usable_cores, usable_memory
from llmtrain.train.devices import memory_bytes

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Provide a function that sets the lines of /proc/self/cgroup and files below /sys/fs/cgroup. The machine has 8 cores
    and 64 GiB."""
    monkeypatch.setattr(process_limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(process_limits, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.__getitem__)

    def write(membership: str, **files: str) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    return write


def test_without_cgroups_cores_are_those_of_the_affinity_and_memory_is_the_machines(
    cgroups: Callable[..., None],
) -> None:
    assert (usable_cores(), usable_memory()) == (8, 64 * GIB)


@pytest.mark.parametrize(
    ("membership", "files", "cores", "memory"),
    [
        ("0::/\n", {"cpu.max": "250000 100000", "memory.max": str(4 * GIB)}, 2, 4 * GIB),
        ("0::/\n", {"cpu.max": "50000 100000", "memory.max": "max"}, 1, 64 * GIB),
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": str(128 * GIB)}, 8, 64 * GIB),
        (
            "0::/job/step\n",
            {"job/cpu.max": "400000 100000", "job/step/memory.max": "max", "job/memory.max": str(GIB)},
            4,
            GIB,
        ),
        ("0::/job\n", {"job/step/cpu.max": "100000 100000", "other/memory.max": str(GIB)}, 8, 64 * GIB),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": str(3 * GIB)}, 8, 3 * GIB),
        # In a container, the mount has no folder for the container's own path, but has the limit at its top.
        ("4:memory:/docker/1234\n", {"memory/memory.limit_in_bytes": str(2 * GIB)}, 8, 2 * GIB),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 8, 64 * GIB),
    ],
    ids=[
        "container",
        "half a core",
        "no limits",
        "Slurm's job",
        "other groups",
        "version 1",
        "its container",
        "its root",
    ],
)
def test_the_least_limit_of_the_cgroups_counts(
    cgroups: Callable[..., None], membership: str, files: dict[str, str], cores: int, memory: int
) -> None:
    cgroups(membership, **files)
    assert (usable_cores(), usable_memory()) == (cores, memory)
    assert memory_bytes(torch.device("cpu")) == memory
