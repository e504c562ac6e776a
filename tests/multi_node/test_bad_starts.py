"""Tests of starts on several hosts that must fail: each rank ends in time, with a line that names the cause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmtrain.compare.cluster.hosts import VirtualHost, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from tests.end_to_end.runs import Runs
from tests.mother import run_llmtrain
from tests.multi_node import only_meet
from tests.multi_node.runs import PORT, arguments, ends, errors, needs_hosts, start_rank

pytestmark = needs_hosts
TIMEOUT, IN_VAIN = 15, 7
"""Timeouts in seconds, the shorter one for starts in which a rank waits until the timeout."""
MORE = 60
"""Seconds that everything else may take on a busy machine."""


@pytest.fixture(scope="module")
def three() -> Iterator[list[VirtualHost]]:
    with virtual_cluster([HostLimits()] * 3, networks=2) as made:
        yield made


def outcome(
    made: list[VirtualHost], size: int, master: str, *networks: str, timeout: int = TIMEOUT
) -> list[tuple[int, list[str]]]:
    """Start one of `size` ranks on each host, with `networks` by rank. Return their exit codes and error lines."""
    asked = [[name] for name in networks] or [[] for _ in made]
    started = [
        start_rank(host, rank, size, master, only_meet.main, str(timeout), *asked[rank])
        for rank, host in enumerate(made)
    ]
    return [(code, errors(output)) for code, output in ends(started, timeout + MORE)]


def test_hosts_meet_over_the_card_that_joins_them(three):
    assert outcome(three, 3, "10.77.0.1") == [(0, [])] * 3


def test_a_host_that_never_comes(three):
    for code, [line] in outcome(three[:2], 3, "10.77.0.1", timeout=IN_VAIN):
        assert code == 1
        assert line.startswith(
            "error: rank 2 of 3 did not answer the roll call at the start at 10.77.0.1:29511 within "
        )
        assert "only rank 0 on host0, rank 1 on host1 did; see the output of the missing ranks" in line


def test_an_unreachable_master(three):
    (code, [line]), (other_code, [other]) = outcome(three[:2], 2, "10.77.0.99", timeout=5)
    assert (code, other_code) == (1, 1)
    assert line.startswith(f"error: rank 0 of 2 on host0 can't listen at 10.77.0.99:{PORT}, where ranks meet: ")
    assert other.startswith(
        f"error: rank 1 of 2 on host1 could not reach rank 0, where ranks meet, at 10.77.0.99:{PORT} "
    )
    assert "a port that is free here" in line and "check MASTER_ADDR and MASTER_PORT" in other


def test_an_interface_that_one_host_does_not_have(three):
    for code, [line] in outcome(three[:2], 2, "10.77.0.1", "eth0", "ens5,ens6"):
        assert code == 2
        assert line.startswith(
            "error: parallel.replica_network is ens5,ens6, but host1 has no such network interface, only eth0, eth1, lo;"
        )
        assert line.endswith("(rank 1 on host1)")


def test_an_interface_that_leads_nowhere(three):
    for code, [line] in outcome(three[:2], 2, "10.77.0.1", "lo", "lo"):
        assert code == 1
        assert line.startswith(
            "error: rank 0 on host0 (lo, 127.0.0.1) does not reach rank 1 on host1 (lo, 127.0.0.1): "
        )
        assert (
            "loopback leads to no other host; set parallel.replica_network to an interface that reaches all hosts"
            in line
        )


def test_an_interface_whose_cable_is_out(three):
    three[2].unplug(1)
    for code, [line] in outcome(three, 3, "10.77.0.1", *["ens5,eth1"] * 3):
        assert code == 1
        assert line.startswith(
            "error: rank 0 on host0 (eth1, 10.77.1.1) does not reach rank 2 on host2 (eth1, 10.77.1.3): "
        )
        assert "parallel.replica_network" in line and "; 2 more ranks can't reach a peer" in line


def test_hosts_that_do_not_share_the_run_directory(runs: Runs, three):
    """Each host gets its own run directory, as on its own disk. This needs llmtrain itself."""
    run = arguments(runs, "apart", "parallel.replicas=2", "parallel.shards=1", f"run.timeout_seconds={IN_VAIN}")
    started = [
        start_rank(host, rank, 2, "10.77.0.1", run_llmtrain, "train", *run, f"run.out_dir={runs.folder}/{host.name}")
        for rank, host in enumerate(three[:2])
    ]
    for code, output in ends(started, TIMEOUT + MORE):
        assert code == 2
        [line] = errors(output)
        assert line.startswith(
            f"error: run.out_dir is not shared: host1 can't see in {runs.folder}/host1/apart what rank 0 on host0 writes to "
            f"{runs.folder}/host0/apart; mount the same file system on all nodes"
        )


def test_a_rank_that_dies_once_all_have_met(runs: Runs, three):
    """One host can't create its folder for tokens. This needs llmtrain itself."""
    run = arguments(runs, "dies", "parallel.replicas=2", "parallel.shards=1", f"run.timeout_seconds={IN_VAIN}")
    (taken := runs.folder / "taken").touch()
    folders = [[], [f"data.cache_dir={taken}"]]
    started = [
        start_rank(three[rank], rank, 2, "10.77.0.1", run_llmtrain, "train", *run, *folders[rank]) for rank in (0, 1)
    ]
    (code, output), (other_code, _) = ends(started, TIMEOUT + MORE)
    assert (code, other_code) == (1, 2)
    [line] = errors(output)
    assert line.startswith(
        f"error: rank 1 of 2 did not answer the roll call after the preparation of data at 10.77.0.1:{PORT}"
    )
    assert "only rank 0 on host0 did; see the output of the missing ranks" in line
