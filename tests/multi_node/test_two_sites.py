"""Tests of two sites with a firewall, NAT or public addresses between them: what works, and errors where it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from llmtrain.compare.cluster.hosts import VirtualHost, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from tests.end_to_end.runs import Runs
from tests.mother import run_llmtrain
from tests.multi_node import only_meet
from tests.multi_node.runs import PORT, arguments, ends, errors, needs_hosts, start_rank
from tests.multi_node.sites import PUBLIC, hide, needs_nft, only_open, set_address, take_ports_from

pytestmark = [needs_hosts, needs_nft]
TIMEOUT = 15
"""Value of run.timeout_seconds, and thus the seconds for one connection attempt."""
MORE = 60
"""Seconds that everything else may take on a busy machine."""
ADVICE = "or join the hosts by a VPN (launch/two_sites.md)"


@pytest.fixture
def two() -> Iterator[list[VirtualHost]]:
    with virtual_cluster([HostLimits()] * 2, networks=2) as made:
        yield made


def outcome(made: list[VirtualHost], master: str = "10.77.0.1", *networks: str) -> list[tuple[int, str]]:
    """Start one rank on each host, and return their exit codes and outputs."""
    started = [
        start_rank(host, rank, len(made), master, only_meet.main, str(TIMEOUT), *networks)
        for rank, host in enumerate(made)
    ]
    return ends(started, TIMEOUT + MORE)


def test_a_narrow_range_of_ports_is_all_that_a_firewall_must_open(two):
    for host in two:
        take_ports_from(host, 21000, 21063)
        only_open(host, f"{PORT}, 21000-21063")
    assert [code for code, _ in outcome(two)] == [0, 0]


@pytest.mark.parametrize(
    ("open_ports", "closed"), [("21000-21047", range(21048, 21064)), ("21016-21063", range(21000, 21016))]
)
def test_a_port_that_is_closed_is_named_with_both_ends(two, open_ports: str, closed: range):
    for host in two:
        take_ports_from(host, 21000, 21063)
        only_open(host, f"{PORT}, {open_ports}")
    for code, output in outcome(two):
        [line] = errors(output)
        assert code == 1
        assert line.startswith(
            "error: rank 0 on host0 (eth0, 10.77.0.1) does not reach rank 1 on host1 (eth0, 10.77.0.2): port "
        )
        assert int(re.search(r"port (\d+): \[Errno 111\] Connection refused; ", line)[1]) in closed
        assert f"open TCP ports 21000-21063 of host1, {ADVICE}" in line and "1 more rank can't reach a peer" in line


def test_a_firewall_of_one_direction_is_found_although_gloo_would_need_only_the_other(two):
    """With gloo, the rank with the higher address connects, which may be the other rank after addresses have changed."""
    only_open(two[1], PORT)
    for code, output in outcome(two):
        assert code == 1
        assert "rank 0 on host0 (eth0, 10.77.0.1) does not reach rank 1 on host1" in output


@pytest.mark.deep
def test_a_firewall_that_drops_in_silence_costs_one_attempt(two):
    only_open(two[0], PORT, "drop")
    for code, output in outcome(two):
        [line] = errors(output)
        assert code == 1
        assert "rank 1 on host1 (eth0, 10.77.0.2) does not reach rank 0 on host0 (eth0, 10.77.0.1): port 3" in line
        assert "timed out; " in line


def test_hosts_that_have_the_same_address_are_told_so(two):
    """Containers on the bridges of two hosts can have the same address. Each host would reach itself."""
    for host in two:
        set_address(host, "172.17.0.2", network=1)
    for code, output in outcome(two, "10.77.0.1", "eth1"):
        [line] = errors(output)
        assert code == 1
        assert line.startswith(
            "error: rank 0 on host0 (eth1, 172.17.0.2) does not reach rank 1 on host1 (eth1, 172.17.0.2): "
            "both hosts have the same address, as in containers or behind NAT; "
        )


def test_a_host_behind_nat_is_named():
    """The second host reaches the store of the first through a router that hides it."""
    with virtual_cluster([HostLimits()] * 3, networks=2) as (first, router, hidden):
        hide(first, router, hidden)
        for code, output in outcome([first, hidden], PUBLIC[0]):
            [line] = errors(output)
            assert code == 1
            assert line.startswith(
                "error: rank 0 on host0 (eth0, 203.0.113.1) does not reach rank 1 on host2 (eth1, 10.77.1.3): port 3"
            )
            assert "Network is unreachable" in line and ADVICE in line


@pytest.mark.parametrize("allowed", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_run_over_a_public_network_warns_once_unless_that_is_allowed(runs: Runs, two, allowed: bool):
    for host, address in zip(two, PUBLIC, strict=True):
        set_address(host, address)
    keys = ["parallel.replicas=2", "parallel.shards=1", f"parallel.allow_unencrypted={str(allowed).lower()}"]
    run_arguments = arguments(runs, f"public-{allowed}", *keys, "train.steps=2", "sync.warmup_steps=1")
    started = [start_rank(two[rank], rank, 2, PUBLIC[0], run_llmtrain, "train", *run_arguments) for rank in (0, 1)]
    ended = ends(started, 120)
    assert [code for code, _ in ended] == [0, 0], ended
    warnings = [line for _, output in ended for line in output.splitlines() if "public network" in line]
    expected = (
        "warning: messages between 203.0.113.1 (eth0 of host0) and 203.0.113.2 (eth0 of host1) cross a public network "
        "unencrypted; join the hosts by a VPN (launch/two_sites.md), or set parallel.allow_unencrypted=true if that network is safe"
    )
    assert warnings == ([] if allowed else [expected])
