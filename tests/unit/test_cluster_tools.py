"""Tests of virtual clusters, with scripts in place of system programs, and of their processes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.compare.cluster import hosts as cluster
from llmtrain.compare.cluster import processes
from llmtrain.compare.cluster.hosts import (
    VirtualHost,
    remove_cluster,
    remove_leftovers,
    virtual_cluster,
    why_no_cluster,
)
from llmtrain.compare.cluster.limits import Controller, HostLimits, shape
from llmtrain.compare.cluster.processes import MARK, CommandError, in_namespace, signal_all
from llmtrain.errors import ClusterError

REFUSES = "echo 'Error: Specified qdisc kind' >&2; echo ' is unknown.' >&2; exit 2"
DEAD = f"llmtrain-{os.getpid()}-0-7"
"""Name of a cluster whose creator has ended. The creator had the pid that is now this process's."""
Script = Callable[..., None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Provide a function that puts a shell script in the place of programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def write(text: str, *names: str) -> None:
        for name in names:
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return write


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Provide a function that sets the user that this process seems to belong to."""
    return lambda user: monkeypatch.setattr(os, "geteuid", lambda: user)


def test_hosts_need_root(be: Callable[[int], None]) -> None:
    be(1000)
    assert why_no_cluster() == "network namespaces need root"
    with pytest.raises(ClusterError, match=r"^virtual hosts can't be created here: network namespaces need root$"):
        virtual_cluster([HostLimits()]).__enter__()


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        (("unshare",), "unshare not installed (packages: util-linux)"),
        (("ip", "tc", "mount"), "ip and tc and mount not installed (packages: iproute2, mount)"),
    ],
)
def test_hosts_need_programs(
    monkeypatch: pytest.MonkeyPatch, be: Callable[[int], None], missing: tuple[str, ...], why: str
) -> None:
    be(0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in missing else f"/bin/{tool}")
    assert why_no_cluster() == why


def test_hosts_need_a_kernel_that_makes_them(tmp_path: Path, script: Script, be: Callable[[int], None]) -> None:
    be(0)
    asked = tmp_path / "asked"
    script("true", "tc", "unshare", "mount")
    script(f'echo "$*" >> {asked}; case "$*" in *veth*) echo "Operation not permitted" >&2; exit 2;; esac', "ip")
    why = why_no_cluster()
    assert why is not None and why.startswith("network namespaces, bridges or veth can't be created (ip -n llmtrain-")
    assert why.endswith(" link add eth0 type veth peer name port: Operation not permitted)")
    first, *_, last = asked.read_text().splitlines()
    assert last == first.replace("add", "delete"), "the namespace that was made for the check is deleted"


@pytest.mark.parametrize("count", [0, 255])
def test_a_network_has_addresses_for_so_many_hosts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(cluster, "why_no_cluster", lambda: None)
    with pytest.raises(ClusterError, match=f"^{count} hosts: expected 1 to 254$"):
        virtual_cluster([HostLimits()] * count).__enter__()


@pytest.mark.parametrize(
    ("refuses", "why"),
    [
        (
            "*tcp_congestion_control*",
            r"ip netns exec .*-host0 sh -c echo reno > /proc/sys/.*: sh: Read-only file system",
        ),
        ("*-switch*master*", r"ip -n .*-switch link set host0net0 master net0 up: sh: Read-only file system"),
        ("none", r"\[Errno 20\] Not a directory: .*"),
    ],
)
def test_a_host_that_the_machine_refuses_to_make_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, refuses: str, why: str
) -> None:
    script(f'case "$*" in {refuses}) echo "sh: Read-only" >&2; echo "file system" >&2; exit 2;; esac', "ip")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cluster, "why_no_cluster", lambda: None)
    monkeypatch.setattr(cluster, "FOLDERS", tmp_path / ("file" if refuses == "none" else "folders"))
    monkeypatch.setattr(cluster, "NAMESPACES", tmp_path / "namespaces")
    with pytest.raises(ClusterError, match=rf"^virtual hosts can't be created here: {why}; .*--no-shaping$"):
        virtual_cluster([HostLimits()]).__enter__()


def test_a_limit_that_the_kernel_refuses_is_named(script: Script) -> None:
    script(REFUSES, "tc")
    with pytest.raises(ClusterError) as refused:
        shape(HostLimits(bandwidth_mbit=30), ("space", "eth0"), ("switch", "port"))
    message = str(refused.value)
    start = (
        "bandwidth_mbit=30 of a host needs tbf, which the kernel refuses (tc -n space qdisc add dev eth0 root handle "
    )
    assert message.startswith(start)
    assert message.endswith(": Error: Specified qdisc kind is unknown.); leave it out, or load the module sch_tbf")


def test_a_program_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COMMAND_SECONDS", 0.01)
    with pytest.raises(CommandError, match=r"^sleep 60: did not end within 0 s$"):
        processes.run("sleep", "60")


def test_a_process_joins_the_control_group_of_its_host_before_its_namespace(tmp_path: Path, script: Script) -> None:
    script('cat "$GROUP"; echo "$@"', "ip")
    group = tmp_path / "cgroup.procs"
    host = VirtualHost("host0", "space", ("10.77.0.1",), "eth0", switch="switch", names=tmp_path / "names", group=group)
    process = host.popen(["true", "a b"], {**os.environ, "GROUP": str(group)}, stdout=subprocess.PIPE, text=True)
    joined, command = process.communicate(timeout=60)[0].splitlines()
    assert joined == str(process.pid)
    assert command.startswith("netns exec space ") and command.endswith(f" {tmp_path / 'names'} host0 true a b")


@pytest.mark.parametrize(("also", "is_gone"), [('rm "$FILES/$3"', True), ("true", False)])
def test_a_namespace_that_another_process_has_removed_is_gone(
    tmp_path: Path,
    script: Script,
    be: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    also: str,
    is_gone: bool,
) -> None:
    files = tmp_path / "netns"
    files.mkdir()
    for name in (f"{DEAD}-host0", f"{DEAD}-switch", "others"):
        (files / name).touch()
    monkeypatch.setenv("FILES", str(files))
    monkeypatch.setattr(cluster, "NAMESPACES", files)
    monkeypatch.setattr(cluster, "FOLDERS", tmp_path / "folders")
    monkeypatch.setattr(cluster, "controller", lambda: None)
    be(0)
    script(f"{also}; echo 'Cannot remove namespace file' >&2; exit 1", "ip")
    if is_gone:
        remove_cluster(DEAD)
        assert [file.name for file in files.iterdir()] == ["others"]
    else:
        with pytest.raises(CommandError, match=f"^ip netns delete {DEAD}-host0: Cannot remove namespace file$"):
            remove_cluster(DEAD)


def test_nothing_runs_in_a_namespace_that_is_gone(tmp_path: Path) -> None:
    assert in_namespace(tmp_path / "gone") == []
    assert os.getpid() in in_namespace(Path("/proc/self/ns/net"))


def test_processes_that_survive_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits inside the kernel, for example for a disk that is gone, does not obey SIGKILL."""
    clock, sent = iter([0.0, 9.9, 10.1]), []
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    monkeypatch.setattr(processes, "stat_of", lambda pid: ["D"])
    monkeypatch.setattr(processes, "send", lambda pid, number: sent.append(number))
    with pytest.raises(TimeoutError) as told:
        signal_all(signal.SIGKILL, lambda: [7], "host0")
    assert str(told.value) == "processes of host0 have not obeyed SIGKILL, 10 s later: 7"
    assert set(sent) == {signal.SIGKILL}


@pytest.fixture
def dead_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the folder of a dead cluster without namespaces or control groups, beside an unrelated folder."""
    folder = tmp_path / "run" / DEAD
    folder.mkdir(parents=True)
    (folder.parent / "others").mkdir()
    monkeypatch.setattr(cluster, "FOLDERS", folder.parent)
    monkeypatch.setattr(cluster, "NAMESPACES", tmp_path / "netns")
    monkeypatch.setattr(cluster, "controller", lambda: None)
    return folder


@pytest.mark.parametrize("user", [0, 1000])
def test_a_user_removes_processes_and_root_the_rest_too(
    dead_cluster: Path, be: Callable[[int], None], user: int
) -> None:
    be(user)
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: f"{DEAD}-host0"})
    remove_cluster(DEAD)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert dead_cluster.exists() == (user != 0)


@pytest.mark.parametrize("user", [0, 1000])
def test_folders_of_dead_clusters_are_found_by_root_alone(
    dead_cluster: Path, monkeypatch: pytest.MonkeyPatch, be: Callable[[int], None], user: int
) -> None:
    be(user)
    removed: list[str] = []
    monkeypatch.setattr(cluster, "marks", dict)
    monkeypatch.setattr(cluster, "remove_cluster", removed.append)
    remove_leftovers()
    assert removed == ([DEAD] if user == 0 else [])


@pytest.mark.parametrize(("pids", "is_removed"), [((), True), ((0,), False)], ids=["nobody", "another namespace's"])
def test_a_cluster_of_another_pid_namespace_is_kept(
    dead_cluster: Path,
    monkeypatch: pytest.MonkeyPatch,
    be: Callable[[int], None],
    pids: tuple[int, ...],
    is_removed: bool,
) -> None:
    """Control groups list the processes of another namespace as pid 0. Killing pid 0 would kill this process, too."""
    be(0)
    group = dead_cluster / "host0"
    group.mkdir()
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in (*pids, os.getpid())))
    removed: list[str] = []
    monkeypatch.setattr(cluster, "controller", lambda: Controller(dead_cluster.parent, 2))
    monkeypatch.setattr(cluster, "marks", dict)
    monkeypatch.setattr(cluster, "remove_cluster", removed.append)
    remove_leftovers()
    assert bool(removed) == is_removed


def test_a_process_on_its_way_out_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exiting process leaves its network namespace, where it is searched for, a moment before it has ended."""
    states, seen, sent = iter([["R"], ["R"], ["X"]]), iter([[7]]), []
    monkeypatch.setattr(processes, "stat_of", lambda pid: next(states))
    monkeypatch.setattr(processes, "send", lambda pid, number: sent.append((pid, number)))
    signal_all(signal.SIGKILL, lambda: next(seen, []), "host0")
    assert sent == [(7, signal.SIGKILL)] and next(states, "seen") == "seen"
