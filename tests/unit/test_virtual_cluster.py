"""Tests of what a virtual cluster decides before it asks the kernel for anything: names, bucket sizes, CPU shares, and mounts."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pydantic import ValidationError

from llmtrain.compare.cluster import hosts as cluster
from llmtrain.compare.cluster import limits
from llmtrain.compare.cluster.hosts import virtual_cluster
from llmtrain.compare.cluster.limits import Controller, HostLimits, controller, largest_packet, token_bucket
from llmtrain.compare.cluster.processes import cluster_of, new_name, owner_lives, start_of
from llmtrain.errors import ClusterError


def test_a_name_tells_its_cluster_and_whether_its_owner_lives():
    name, other = new_name(), new_name()
    assert name != other
    assert cluster_of(name) == cluster_of(f"{name}-host1") == cluster_of(f"{name}-switch") == name
    assert owner_lives(name) and owner_lives(other)


def test_a_reused_pid_protects_nothing():
    me, start = os.getpid(), start_of(os.getpid())
    assert owner_lives(f"llmtrain-{me}-{start}-0")
    assert not owner_lives(f"llmtrain-{me}-{start + 1}-0")


def test_an_owner_that_nobody_has_waited_for_is_dead():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}").exists() and start_of(process.pid) is None
    process.wait(timeout=10)
    assert start_of(process.pid) is None


@pytest.mark.parametrize("name", ["host0", "llmtrain", "llmtrain-12-0-host0", "llmtrain-1-2-3x", "my-llmtrain-1-2-3"])
def test_names_of_others_are_no_clusters(name: str):
    assert cluster_of(name) is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bandwidth_mbit", 0, "greater than 0"),
        ("latency_ms", -1, "greater than 0"),
        ("loss", 1.0, "less than 1"),
        ("cpus", float("inf"), "a finite number"),
        ("cpus", float("nan"), "a finite number"),
    ],
)
def test_limits_are_positive_numbers(key: str, value: float, expected: str):
    with pytest.raises(ValidationError, match=rf"{key}\n  Input should be {expected}"):
        HostLimits(**{key: value})


def test_a_bucket_holds_a_millisecond_and_a_queue_fifty_but_neither_is_tiny():
    lines = [token_bucket(mbit).split() for mbit in (10, 30, 100, 1000, 10_000)]
    sizes = [{name: int(words[words.index(name) + 1]) for name in ("burst", "limit")} for words in lines]
    assert [size["burst"] for size in sizes] == [8192, 8192, 12_500, 125_000, 1_250_000]
    assert [size["limit"] for size in sizes] == [262_144, 262_144, 625_000, 6_250_000, 62_500_000]


def test_a_queue_holds_a_round_trip():
    near, far = HostLimits(latency_ms=20), HostLimits(latency_ms=100)
    assert (near.queue_seconds, far.queue_seconds, HostLimits().queue_seconds) == (0.05, 0.2, 0.05)
    assert token_bucket(100, far.queue_seconds).endswith(" limit 2500000")


def test_no_packet_is_larger_than_the_smallest_bucket_of_the_cluster():
    assert largest_packet([HostLimits()]) == largest_packet([HostLimits(bandwidth_mbit=1000)]) == 65_536
    assert largest_packet([HostLimits(bandwidth_mbit=1000), HostLimits(bandwidth_mbit=30), HostLimits()]) == 5120


def test_lost_packets_are_frames_of_their_own():
    assert largest_packet([HostLimits(bandwidth_mbit=1000), HostLimits(loss=0.01)]) == limits.FRAME


def test_a_cable_may_receive_less_than_it_sends(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(limits, "run", lambda *command: asked.append(command))
    own = HostLimits(bandwidth_mbit=30, downlink_mbit=10)
    limits.shape(own, ("space", "eth0"), ("switch", "port"))
    rates = {command[2]: command[command.index("rate") + 1] for command in asked}
    assert rates == {"space": "30000000bit", "switch": "10000000bit"}
    assert largest_packet([own]) == 5120
    asked.clear()
    limits.shape(HostLimits(latency_ms=2.5, loss=0.1, cpus=1), ("space", "eth0"), ("switch", "port"))
    assert asked == []


@pytest.mark.parametrize(
    ("cpus", "quota", "period"), [(0.5, 10_000, 20_000), (2.5, 50_000, 20_000), (0.01, 1_000, 100_000)]
)
def test_a_share_is_given_in_periods_as_short_as_the_kernel_lets_them_be(
    tmp_path: Path, cpus: float, quota: int, period: int
):
    group = Controller(tmp_path, 1).make("llmtrain-1-2-3", "host0", cpus).parent
    assert (group / "cpu.cfs_quota_us").read_text() == str(quota)
    assert (group / "cpu.cfs_period_us").read_text() == str(period)


def test_a_share_too_small_for_the_kernel_is_refused(tmp_path: Path):
    with pytest.raises(ClusterError, match=r"cpus=0\.0001 of a host: the kernel can't give less than 0\.001"):
        Controller(tmp_path, 1).make("llmtrain-1-2-3", "host0", 0.0001)
    assert list(tmp_path.iterdir()) == []


Mount = Callable[[str, str, str], Path]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Provide a function that adds folders to the list of mounts, which is otherwise empty."""
    mounts: list[SimpleNamespace] = []
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)

    def add(name: str, fstype: str, opts: str) -> Path:
        (tmp_path / name).mkdir()
        mounts.append(SimpleNamespace(mountpoint=str(tmp_path / name), fstype=fstype, opts=opts))
        return tmp_path / name

    return add


@pytest.fixture
def hybrid(mount: Mount) -> Path:
    """Mount control groups of both versions, neither of which limits CPU time. Return the folder of version 2."""
    mount("cgroup", "tmpfs", "rw,mode=755")
    unified = mount("unified", "cgroup2", "rw,relatime")
    mount("cpuacct", "cgroup", "rw,relatime,cpuacct")
    mount("cpuset", "cgroup", "rw,relatime,cpuset")
    return unified


@pytest.mark.parametrize(("handed_down", "then"), [("memory pids\n", "+cpu"), ("cpu memory\n", "cpu memory\n")])
def test_version_2_hands_the_controller_down_to_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed_down: str, then: str
):
    def mkdir_as_the_kernel(path: Path, exist_ok: bool = False) -> None:
        os.mkdir(path)
        (path / "cgroup.subtree_control").write_text("")

    (tmp_path / "cgroup.subtree_control").write_text(handed_down)
    monkeypatch.setattr(Path, "mkdir", mkdir_as_the_kernel)
    procs = Controller(tmp_path, 2).make("llmtrain-1-2-3", "host0", 0.25)
    cluster = tmp_path / "llmtrain-1-2-3"
    assert procs == cluster / "host0" / "cgroup.procs"
    assert (tmp_path / "cgroup.subtree_control").read_text() == then
    assert (cluster / "cgroup.subtree_control").read_text() == "+cpu"
    assert (cluster / "host0" / "cgroup.subtree_control").read_text() == ""
    assert (cluster / "host0" / "cpu.max").read_text() == "5000 20000"


def test_control_groups_that_may_not_be_written_are_refused(tmp_path: Path):
    with pytest.raises(ClusterError, match=r"^cpus=0\.5 of host0: limits of CPU time can't be set below "):
        Controller(tmp_path / "nothing", 1).make("llmtrain-1-2-3", "host0", 0.5)


def test_version_1_has_a_file_for_the_period_and_one_for_the_quota(tmp_path: Path) -> None:
    procs = Controller(tmp_path, 1).make("llmtrain-1-2-3", "host0", 0.25)
    group = tmp_path / "llmtrain-1-2-3" / "host0"
    assert procs == group / "cgroup.procs"
    written = {file.name: file.read_text() for file in group.iterdir()}
    assert written == {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "5000"}


@pytest.mark.parametrize(
    ("controllers", "is_taken"), [("cpuset cpu io\n", True), ("cpuset io\n", False), (None, False)]
)
def test_a_tree_of_version_2_is_taken_if_it_limits_cpu_time(
    mount: Mount, hybrid: Path, controllers: str | None, is_taken: bool
) -> None:
    other = mount("other", "cgroup2", "rw")
    (other / "cgroup.controllers").write_text("io\n")
    if controllers is not None:
        (hybrid / "cgroup.controllers").write_text(controllers)
    assert controller() == (Controller(hybrid, 2) if is_taken else None)


def test_version_1_is_taken_where_both_are_mounted(mount: Mount, hybrid: Path) -> None:
    (hybrid / "cgroup.controllers").write_text("cpu io\n")
    joint = mount("cpu,cpuacct", "cgroup", "rw,nosuid,cpu,cpuacct")
    assert controller() == Controller(joint, 1)


def test_this_machines_mounts_are_read() -> None:
    known = {(mount.mountpoint, mount.fstype): mount.opts.split(",") for mount in psutil.disk_partitions(all=True)}
    assert any(fstype == "proc" for _, fstype in known)
    found = controller()
    if found is None:
        assert not [top for (top, fstype), options in known.items() if fstype == "cgroup" and "cpu" in options]
    else:
        assert (str(found.top), {1: "cgroup", 2: "cgroup2"}[found.version]) in known


@pytest.mark.parametrize("has_proc", [True, False], ids=["none mounted", "no /proc"])
def test_shares_are_refused_where_no_control_group_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hybrid: Path, has_proc: bool
) -> None:
    def no_proc(all: bool) -> None:
        raise FileNotFoundError("/proc/self/mounts")

    if not has_proc:
        monkeypatch.setattr(psutil, "disk_partitions", no_proc)
    assert controller() is None
    monkeypatch.setattr(cluster, "why_no_cluster", lambda: None)
    monkeypatch.setattr(cluster, "run", lambda *command: "")
    monkeypatch.setattr(cluster, "FOLDERS", tmp_path / "folders")
    monkeypatch.setattr(cluster, "NAMESPACES", tmp_path / "namespaces")
    message = r"^cpus=0\.5 of a host: no control group for CPU time is mounted here; leave cpus out$"
    with pytest.raises(ClusterError, match=message):
        virtual_cluster([HostLimits(cpus=0.5)]).__enter__()


@pytest.mark.parametrize("free_after", [1, 4.9])
def test_a_group_that_is_busy_is_removed_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_after: float
) -> None:
    now = a_busy_group(tmp_path, monkeypatch, free_after)
    Controller(tmp_path, 1).remove("llmtrain-1-2-3")
    assert not (tmp_path / "llmtrain-1-2-3").exists()
    assert now[0] == pytest.approx(free_after, abs=0.03)


def test_a_group_that_stays_busy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = a_busy_group(tmp_path, monkeypatch, free_after=60)
    with pytest.raises(OSError, match="host0") as told:
        Controller(tmp_path, 1).remove("llmtrain-1-2-3")
    assert told.value.errno == errno.ENOTEMPTY and now[0] == pytest.approx(5, abs=0.03)


def a_busy_group(top: Path, monkeypatch: pytest.MonkeyPatch, free_after: float) -> list[float]:
    """Make a host's group that is busy until `free_after` by a fake clock, which only sleeping advances. Return a list with
    its time."""
    thing = top / "llmtrain-1-2-3" / "host0" / "thing"
    thing.parent.mkdir(parents=True)
    thing.touch()
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= free_after:
            thing.unlink(missing_ok=True)

    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def test_a_host_that_can_not_be_killed_leaves_no_cluster_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stuck:
        def kill(self) -> None:
            done.append("kill")
            raise TimeoutError("does not end")

    monkeypatch.setattr(cluster, "remove_leftovers", lambda: None)
    monkeypatch.setattr(cluster, "remove_cluster", lambda name: done.append("remove"))
    with pytest.raises(TimeoutError), cluster._new_cluster() as (_, hosts):
        hosts += [Stuck(), Stuck()]
    assert done == ["kill", "kill", "remove"]
