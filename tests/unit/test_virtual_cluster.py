"""What a virtual cluster decides before it asks the kernel for anything: names, sizes of buckets, shares, mounts."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.compare.cluster import HostLimits, cpu_limits
from llmtrain.compare.cluster.cpu_limits import (
    Controller,
    controller,
    controller_or_refuse,
    mounted,
    quota_and_period,
)
from llmtrain.compare.cluster.names import cluster_of, new_name, owner_lives, start_of
from llmtrain.compare.cluster.shaping import burst_bytes, download, largest_packet, queue_bytes, upload
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


@pytest.mark.parametrize(("key", "value"), [("bandwidth_mbit", 0), ("latency_ms", -1), ("cpus", float("inf"))])
def test_limits_are_positive_numbers(key: str, value: float):
    with pytest.raises(ClusterError, match=rf"^{key}={value} of a host: expected a number above 0"):
        HostLimits(**{key: value})


def test_a_bucket_holds_a_millisecond_and_a_queue_fifty_but_neither_is_tiny():
    assert [burst_bytes(mbit) for mbit in (10, 30, 100, 1000, 10_000)] == [8192, 8192, 12_500, 125_000, 1_250_000]
    assert [queue_bytes(mbit) for mbit in (10, 30, 100, 1000)] == [262_144, 262_144, 625_000, 6_250_000]


def test_no_packet_is_larger_than_the_smallest_bucket_of_the_cluster():
    assert largest_packet([HostLimits()]) == largest_packet([HostLimits(bandwidth_mbit=1000)]) == 65_536
    assert largest_packet([HostLimits(bandwidth_mbit=1000), HostLimits(bandwidth_mbit=30), HostLimits()]) == 5120


def test_latency_is_behind_the_bucket_of_what_a_host_sends_and_nowhere_else():
    both, tbf = (
        HostLimits(bandwidth_mbit=30, latency_ms=2.5),
        "root handle 1: tbf rate 30000000bit burst 8192 limit 262144",
    )
    netem = "handle 2: netem delay 2500us limit 100000"
    assert [" ".join(line) for line in upload(both)] == [tbf, f"parent 1:1 {netem}"]
    assert [" ".join(line) for line in download(both)] == [tbf]
    assert [" ".join(line) for line in upload(HostLimits(latency_ms=2.5))] == [f"root {netem}"]
    assert upload(HostLimits(cpus=1)) == download(HostLimits(latency_ms=2.5)) == []


def test_a_share_is_given_in_periods_as_short_as_the_kernel_lets_them_be():
    assert quota_and_period(0.5) == (10_000, 20_000)
    assert quota_and_period(2.5) == (50_000, 20_000)
    assert quota_and_period(0.01) == (1_000, 100_000)
    with pytest.raises(ClusterError, match=r"cpus=0\.0001 of a host: the kernel can't give less than 0\.001"):
        quota_and_period(0.0001)


HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_control_groups_of_either_version_are_found():
    joint = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    unified = Controller(Path("/sys/fs/cgroup/unified"), 2)
    assert list(mounted(HYBRID)) == [unified]
    assert list(mounted(HYBRID + joint)) == [Controller(Path("/sys/fs/cgroup/cpu,cpuacct"), 1), unified]
    alone = (
        "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
    )
    assert list(mounted(alone)) == [Controller(Path("/sys/fs/cgroup"), 2)]
    assert list(mounted("23 1 0:21 / /proc rw - proc proc rw\n")) == []


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str | None, is_taken: bool
) -> None:
    (tmp_path / "mountinfo").write_text(f"35 24 0:30 / {tmp_path} rw shared:4 - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(cpu_limits, "MOUNTS", tmp_path / "mountinfo")
    if controllers is not None:
        (tmp_path / "cgroup.controllers").write_text(controllers)
    assert controller() == (Controller(tmp_path, 2) if is_taken else None)


def test_version_1_is_taken_where_both_are_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = f"32 31 0:29 / {tmp_path} rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    (tmp_path / "mountinfo").write_text(HYBRID + joint)
    monkeypatch.setattr(cpu_limits, "MOUNTS", tmp_path / "mountinfo")
    assert controller_or_refuse(0.5) == controller() == Controller(tmp_path, 1)


@pytest.mark.parametrize("mounts", ["23 1 0:21 / /proc rw - proc proc rw\n", None], ids=["none mounted", "no /proc"])
def test_shares_are_refused_where_no_control_group_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str | None
) -> None:
    monkeypatch.setattr(cpu_limits, "MOUNTS", tmp_path / "mountinfo")
    if mounts is not None:
        (tmp_path / "mountinfo").write_text(mounts)
    assert controller() is None
    message = r"^cpus=0\.5 of a host: no control group for CPU time is mounted here; leave cpus out$"
    with pytest.raises(ClusterError, match=message):
        controller_or_refuse(0.5)


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
    """What is in a host's group goes away after so many seconds of a clock, which is returned and runs in naps alone."""
    thing = top / "llmtrain-1-2-3" / "host0" / "thing"
    thing.parent.mkdir(parents=True)
    thing.touch()
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= free_after:
            thing.unlink(missing_ok=True)

    monkeypatch.setattr(cpu_limits, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now
