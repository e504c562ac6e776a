"""Tests of a run directory on the first host's disk that the other host mounts by sshfs, as in launch/two_sites.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmtrain.compare.cluster.hosts import VirtualHost, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from tests.end_to_end.runs import ROOT, Runs, exact_lines, ranks_of
from tests.mother import Process, run_llmtrain
from tests.multi_node.runs import PORT, ends, errors, fork, needs_hosts
from tests.multi_node.ssh import ssh_between

MISSING = [name for name in ("sshd", "ssh-keygen", "sshfs") if shutil.which(name) is None]
pytestmark = [
    needs_hosts,
    pytest.mark.deep,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (packages openssh-server, sshfs)"),
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="no /dev/fuse"),
]
SECONDS = 240
"""Timeout of a run on a busy machine."""
TIMEOUT = 20
"""Value of run.timeout_seconds."""


def documented_options() -> str:
    """Return the options of sshfs in launch/two_sites.md."""
    lines = (ROOT / "launch" / "two_sites.md").read_text(encoding="utf-8").splitlines()
    [words] = [line.split() for line in lines if line.startswith("    sshfs ")]
    return words[words.index("-o") + 1]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[list[VirtualHost], Path]]:
    """Provide two hosts, of which the first runs sshd, and the folder of an `ssh` that logs in there."""
    with virtual_cluster([HostLimits()] * 2) as made, ssh_between(made[:1], tmp_path) as tools:
        yield made, tools


def launch_mounted(folder: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Mount a folder of the first host at the same path, for this process and its children alone, and call a function."""
    subprocess.run(["sshfs", "-o", documented_options(), f"root@host0:{folder}", folder], check=True)
    return fn(*args)


def start_both(
    two: tuple[list[VirtualHost], Path], runs: Runs, name: str, *overrides: str, held_after: int | None = None
) -> list[Process]:
    """Start a run with one rank on each host, and return the launchers. With `held_after`, rank 1 waits after that step."""
    (first, second), tools = two
    folder = runs.path(name).parent
    folder.mkdir(parents=True, exist_ok=True)
    keys = ("parallel.replicas=2", "parallel.shards=1", f"run.timeout_seconds={TIMEOUT}", *overrides)
    started = (
        (run_llmtrain, "launch", *runs.command(name, *keys)[2:])
        if held_after is None
        else runs.held(name, held_after, *keys)
    )
    variables = {"NNODES": "2", "MASTER_ADDR": first.addresses[0], "MASTER_PORT": PORT}
    path = f"{tools}:{os.environ['PATH']}"
    launchers = [
        fork(first, *started, NODE_RANK="0", **variables),
        fork(second, launch_mounted, str(folder), *started, NODE_RANK="1", PATH=path, **variables),
    ]
    if held_after is not None:
        runs.wait_until_held(name, launchers[0])
    return launchers


def sshfs_of(host: VirtualHost) -> psutil.Process:
    """Return the process behind a host's mounted folder."""
    [found] = [process for process in map(psutil.Process, host.pids()) if process.name() == "sshfs"]
    return found


def test_a_run_continues_from_the_mounted_folder_with_the_same_bits(two, runs: Runs) -> None:
    launchers = start_both(two, runs, "mounted", "run.restarts=1", held_after=4)
    runs.wait_for("mounted", 3)
    sshfs_of(two[0][1])  # the folder is mounted
    (victim,) = ranks_of(launchers[1])
    victim.kill()
    ended = ends(launchers, SECONDS)
    assert [code for code, _ in ended] == [0, 0], ended
    assert f"continuing from {runs.path('mounted')}/checkpoints/step-00000003" in ended[0][1]
    assert runs.exact("mounted") == exact_lines(runs.reference(2, 1))


def test_the_folder_is_back_after_the_link_was_interrupted(two, runs: Runs) -> None:
    steps, name = 300, "interrupted"
    keys = ("run.restarts=0", f"train.steps={steps}", "schedule.warmup_steps=2", "checkpoint.every=50")
    launchers = start_both(two, runs, name, *keys)
    runs.wait_for(name, 50)
    second = two[0][1]
    second.unplug()
    time.sleep(1)  # for what has been sent
    before = len(runs.lines(name))
    time.sleep(TIMEOUT / 3 - 1)
    assert len(runs.lines(name)) == before < steps, "the run did not need the network"
    second.plug_in()
    ended = ends(launchers, SECONDS)
    assert [code for code, _ in ended] == [0, 0], ended
    assert [line["step"] for line in runs.lines(name) if "train/loss" in line] == list(range(1, steps + 1))


def test_a_folder_that_is_gone_ends_the_run_and_leaves_its_checkpoints(two, runs: Runs) -> None:
    launchers = start_both(two, runs, "gone", "run.restarts=0", "train.steps=100000", "checkpoint.every=20")
    runs.wait_for("gone", 20)
    sshfs_of(two[0][1]).kill()
    ended = ends(launchers, SECONDS)
    assert [code for code, _ in ended] == [1, 1], ended
    for _, output in ended:
        assert any(
            " could not be written: " in line and "older checkpoints are as they were" in line
            for line in errors(output)
        ), output
    runs.wait_for("gone", 20)
