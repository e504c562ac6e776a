"""Removal of clusters, including those of processes that died before they could remove them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llmtrain.compare.cluster import cpu_limits, namespaces
from llmtrain.compare.cluster.names import PREFIX, cluster_of, owner_lives
from llmtrain.compare.cluster.processes import kill_all, marks

FOLDERS = Path("/run") / PREFIX
"""Folder with a subfolder per virtual cluster. Owned by root, as clusters are, and empty after a reboot."""


def remove_leftovers() -> None:
    """Remove the clusters of processes that died, and kill the processes that still run in them.

    Clusters of living processes are not touched. Without root, only this user's loopback clusters are removed.
    """
    for cluster in sorted(_clusters()):
        if not owner_lives(cluster):
            remove_cluster(cluster)


def remove_cluster(cluster: str) -> None:
    """Remove a cluster and its processes.

    Raises TimeoutError, OSError or CommandError if something can't be removed.
    """
    kill_all(lambda: [pid for pid, mark in marks().items() if cluster_of(mark) == cluster], cluster)
    if not _is_root():
        return
    namespaces.remove(cluster)
    if (controller := cpu_limits.controller()) is not None:
        controller.remove(cluster)
    shutil.rmtree(FOLDERS / cluster, ignore_errors=True)


def _clusters() -> set[str]:
    names = {name for mark in marks().values() if (name := cluster_of(mark)) is not None}
    if not _is_root():
        return names
    controller = cpu_limits.controller()
    groups = controller.clusters() if controller is not None else set()
    folders = {path.name for path in FOLDERS.iterdir()} if FOLDERS.is_dir() else set()
    return names | namespaces.clusters() | groups | {name for name in folders if cluster_of(name) == name}


def _is_root() -> bool:
    return os.geteuid() == 0
